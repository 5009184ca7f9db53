"""How well prefix killers are found: planted ones of every kind, and traffic without any.

    make prefix-report
    python -m loadtests.prefix_report --cases 400 --first-seed 20000

Each case is the traffic of one application, made by a seeded generator (`planted_prompts.py`),
and looked at as `kvway check` does without a model. A finding is right if its kind is the planted
one and its offset is within the planted text of its example. The default seeds were not looked at
while the finder was written.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvway_core.testing.clean_prompts import CLEAN
from kvway_core.testing.planted_prompts import Case, clean_case, planted_cases
from kvway_router.check_prompts import EndlessCache, PlainPrompter
from kvway_router.prefixes.finder import PrefixFinder
from kvway_router.prefixes.findings import Finding
from loadtests.report import Report, commit, machine, table

BLOCK_SIZE = 16
HELD_OUT_SEED = 10_000
CLEAN_SEEDS = 20


@dataclass(slots=True)
class Score:
    """What was found of some cases.

    Attributes:
        cases: Cases by planted kind.
        found: Cases with a finding, by planted kind.
        named: Cases in which one is of the planted kind.
        placed: Cases in which that one's offset is within the planted text.
        extra: Findings beside the right one, of any case.
        wrong: What went wrong, case by case.
        looks: Prompts looked at.
        look_s: CPU time of looking at them.
    """

    cases: Counter[str] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)
    named: Counter[str] = field(default_factory=Counter)
    placed: Counter[str] = field(default_factory=Counter)
    extra: int = 0
    wrong: list[str] = field(default_factory=list)
    looks: int = 0
    look_s: float = 0.0

    @property
    def precision(self) -> float:
        """Right findings by all findings; 1 when there are none."""
        right = self.placed.total()
        return right / (right + self.extra) if right + self.extra else 1.0

    @property
    def recall(self) -> float:
        """Right findings by planted cases."""
        return self.placed.total() / max(1, self.cases.total())

    @property
    def kind_accuracy(self) -> float:
        """Of the cases in which something was found, those of the right kind."""
        return self.named.total() / max(1, self.found.total())


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the report; returns 1 if less is found than is promised."""
    parser = argparse.ArgumentParser(description="Score the search for prefix killers.")
    parser.add_argument("--cases", type=int, default=200, help="planted cases (%(default)s)")
    parser.add_argument("--first-seed", type=int, default=HELD_OUT_SEED, help="(%(default)s)")
    parser.add_argument(
        "--clean-seeds", type=int, default=CLEAN_SEEDS, help="of each clean traffic (%(default)s)"
    )
    parser.add_argument("--output", type=Path, help="write the JSON into this file as well")
    options = parser.parse_args(argv)
    planted = score(planted_cases(options.cases, first_seed=options.first_seed))
    seeds = range(options.first_seed, options.first_seed + options.clean_seeds)
    clean = score(clean_case(name, seed=seed) for name in CLEAN for seed in seeds)
    rows = [
        (kind, num, planted.found[kind], planted.named[kind], planted.placed[kind])
        for kind, num in planted.cases.items()
    ]
    print(table(("planted", "cases", "found", "right kind", "right place"), rows))
    print(f"\n{len(CLEAN)} kinds of clean traffic, {len(seeds)} seeds each")
    for line in (*planted.wrong, *clean.wrong):
        print(line)
    extra = planted.extra + clean.extra
    right = planted.placed.total()
    report = Report(
        bench="prefix-report",
        commit=commit(),
        machine=machine(),
        command=f"python -m loadtests.prefix_report --cases {options.cases} "
        f"--first-seed {options.first_seed} --clean-seeds {options.clean_seeds}",
        metrics={
            "cases": options.cases,
            "precision": round(right / max(1, right + extra), 4),
            "recall": round(planted.recall, 4),
            "kind_accuracy": round(planted.kind_accuracy, 4),
            "clean_cases": len(CLEAN) * len(seeds),
            "clean_false_findings": clean.extra,
            "look_us": round(
                1e6 * (planted.look_s + clean.look_s) / max(1, planted.looks + clean.looks)
            ),
        },
    )
    if options.output is not None:
        options.output.write_text(report.json() + "\n")
    print(report.json())
    return 0 if planted.recall >= 0.95 and not clean.extra else 1


def score(cases: Iterable[Case]) -> Score:
    """Returns what is found of cases."""
    result = Score()
    for case in cases:
        findings = _findings(case, result)
        if case.kind is None:
            result.extra += len(findings)
            result.wrong += [f"{case.name}: {finding.kind.value}" for finding in findings]
            continue
        result.cases[case.kind] += 1
        result.found[case.kind] += bool(findings)
        named = [finding for finding in findings if finding.kind.value == case.kind]
        result.named[case.kind] += bool(named)
        placed = [finding for finding in named if is_placed(finding, case)]
        result.placed[case.kind] += bool(placed)
        result.extra += len(findings) - bool(placed)
        if not placed or len(findings) > 1:
            told = [(f.kind.value, f.message, f.char, f.example) for f in findings]
            result.wrong.append(f"{case.name}: {told or 'nothing found'}")
    return result


def is_placed(finding: Finding, case: Case) -> bool:
    """Says whether a finding is where something was planted."""
    span = case.spans[int(finding.example)]
    if span is None or span.message != finding.message:
        return False
    return (
        finding.role == "tools" if span.message is None else span.begin <= finding.char <= span.end
    )


def _findings(case: Case, result: Score) -> list[Finding]:
    cache = EndlessCache(PlainPrompter(), block_size=BLOCK_SIZE)
    finder = PrefixFinder(cache.count_tokens)
    for number, body in enumerate(case.requests):
        prompt = cache.take(str(number), body).seen
        begun_s = time.process_time()
        _ = finder.look(prompt, now_s=0.0)
        result.look_s += time.process_time() - begun_s
        result.looks += 1
    return finder.findings(now_s=0.0)


if __name__ == "__main__":
    sys.exit(main())
