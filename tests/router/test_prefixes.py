"""What keeps prompts from sharing is found, named and placed; what does not is left alone."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvway_core.testing.clean_prompts import CLEAN
from kvway_core.testing.planted_prompts import KINDS, clean_case, planted_case
from kvway_router.check_prompts import EndlessCache, PlainPrompter
from kvway_router.prefixes import finder as finder_module
from kvway_router.prefixes.finder import FORGET_S, MIN_LOST, PrefixFinder
from kvway_router.prefixes.findings import Finding
from kvway_router.prefixes.seen import SeenPrompt
from kvway_router.prefixes.values import Kind
from loadtests.prefix_report import score

SEEDS = (700, 701, 702)
STABLE = " ".join(
    f"Rule {n}: be kind to visitor {n * 37 % 101} and note it down." for n in range(40)
)


def found(bodies: list[dict[str, Any]], **fields: Any) -> tuple[list[Finding], PrefixFinder]:
    """Returns what is found of requests behind an endless cache."""
    cache = EndlessCache(PlainPrompter(), block_size=16)
    finder = PrefixFinder(cache.count_tokens)
    for number, body in enumerate(bodies):
        prompt = cache.take(str(number), body).seen
        changed = {
            name: getattr(prompt, name) for name in SeenPrompt.__dataclass_fields__
        } | fields
        _ = finder.look(SeenPrompt(**changed), now_s=number)
    return finder.findings(now_s=len(bodies)), finder


def system(text: str, question: str = "Why?") -> dict[str, Any]:
    messages = [{"role": "system", "content": text}, {"role": "user", "content": question}]
    return {"model": "m", "messages": messages}


def numbered(value: object) -> dict[str, Any]:
    return system(f"Ticket {value} is open.\n\n{STABLE}", f"Question of {value}?")


def test_every_kind_can_be_planted() -> None:
    assert set(KINDS) == {kind.value for kind in Kind}


@pytest.mark.parametrize("kind", KINDS)
def test_a_planted_killer_is_found_named_and_placed(kind: str) -> None:
    result = score(planted_case(kind, seed=seed) for seed in SEEDS)
    assert (result.placed.total(), result.wrong) == (len(SEEDS), [])


@pytest.mark.parametrize("name", CLEAN)
def test_clean_traffic_is_left_alone(name: str) -> None:
    result = score(clean_case(name, seed=seed) for seed in SEEDS)
    assert result.wrong == []
    assert result.looks > 30


def test_what_another_order_costs_is_followed_to_its_end() -> None:
    for seed in (10, 127, 166, 179):  # tools, their parameters, an object
        case = planted_case("key_order", seed=seed)
        ((finding,), _) = found(list(case.requests))
        assert finding.hit_rate_if_moved > 0.8, case.name


def test_cases_are_the_same_every_time() -> None:
    assert planted_case("uuid", seed=1) == planted_case("uuid", seed=1)
    assert planted_case("uuid", seed=1) != planted_case("uuid", seed=2)


def test_offsets_count_tokens_and_characters() -> None:
    ((finding,), _) = found([numbered(1_000_000 + 7919 * n) for n in range(8)])
    assert (finding.kind, finding.message, finding.role) == (Kind.NUMERIC_ID, 0, "system")
    assert finding.char == len("Ticket ")
    assert finding.token == len("<system>\nTicket ") // 4
    assert finding.shape == "9999999"


def test_tokens_and_shares_add_up() -> None:
    ((finding,), finder) = found([numbered(1_000_000 + 7919 * n) for n in range(8)])
    assert finding.requests == 7
    assert finding.request_share == pytest.approx(7 / 8)
    assert finding.lost_tokens == pytest.approx(7 * len(STABLE) / 4, rel=0.02)
    assert finding.lost_tokens_per_request == pytest.approx(finding.lost_tokens / 7)
    assert finding.token_share == pytest.approx(finding.lost_tokens / finder.totals.prompt_tokens)
    assert finder.avoidable_tokens[Kind.NUMERIC_ID] == pytest.approx(finding.lost_tokens)
    assert finding.hit_rate == 0
    assert finding.hit_rate_if_moved == pytest.approx(0.97, abs=0.02)


def test_a_weight_stands_for_requests() -> None:
    cache = EndlessCache(PlainPrompter(), block_size=16)
    finder = PrefixFinder(cache.count_tokens)
    for n in range(8):
        prompt = cache.take(str(n), numbered(1_000_000 + 7919 * n)).seen
        _ = finder.look(prompt, now_s=0, weight=5)
    (finding,) = finder.findings(now_s=0)
    assert finding.requests == 35
    assert finding.request_share == pytest.approx(7 / 8)


def test_the_time_to_first_token_is_predicted() -> None:
    ((finding,), _) = found(
        [numbered(1_000_000 + 7919 * n) for n in range(8)], ttft_s=2.0, token_s=0.001
    )
    assert finding.ttft_s == 2.0
    saved_s = finding.lost_tokens_per_request * 0.001
    assert finding.ttft_s_if_moved == pytest.approx(2.0 - saved_s)


def test_no_prompt_text_is_told() -> None:
    for kind in KINDS:
        case = planted_case(kind, seed=5)
        findings, _ = found(list(case.requests))
        assert findings
        told = msgspec.json.encode(findings).decode()
        words = json.dumps(case.requests).split()
        runs = {" ".join(words[n : n + 3]) for n in range(len(words) - 2)}
        assert not [run for run in runs if run in told]


def test_fewer_than_some_requests_prove_nothing() -> None:
    values = [1_000_000 + 7919 * n for n in range(MIN_LOST + 1)]
    assert found([numbered(value) for value in values[:-1]])[0] == []
    assert len(found([numbered(value) for value in values])[0]) == 1


def test_values_that_come_again_are_no_killer() -> None:
    values = [1_000_000 + 7919 * (n % 8) for n in range(8 * 30)]
    findings, finder = found([numbered(value) for value in values])
    assert findings == []
    assert finder.avoidable_tokens[Kind.NUMERIC_ID] > 0  # it looked like one at first


def test_what_was_evicted_is_no_killer() -> None:
    # Two values by turns, and nothing is ever held: the cache is too small, the prompt is fine.
    bodies = [numbered(1_000_000 + n % 2) for n in range(20)]
    assert found(bodies, hit_tokens=0)[0] == []


def test_what_another_replica_holds_is_no_loss() -> None:
    bodies = [numbered(1_000_000 + 7919 * n) for n in range(8)]
    cache = EndlessCache(PlainPrompter(), block_size=16)
    finder = PrefixFinder(cache.count_tokens)
    for n, body in enumerate(bodies):
        prompt = cache.take(str(n), body).seen
        held = SeenPrompt(
            ref=prompt.ref,
            namespace=prompt.namespace,
            data=prompt.data,
            parts=prompt.parts,
            num_tokens=prompt.num_tokens,
            hit_tokens=prompt.num_tokens - 65,
        )
        _ = finder.look(held, now_s=0)
    assert finder.findings(now_s=0) == []


def test_namespaces_share_nothing() -> None:
    # What each prompt of "a" has behind its value, one of "b" had, and no other of "a".
    bodies: list[dict[str, Any]] = []
    for n in range(9):
        text = " ".join(random.Random(n).sample(STABLE.split(), 200))
        for model in ("b", "a"):
            value = 1_000_000 + 7919 * len(bodies)
            bodies.append(system(f"Ticket {value} is open.\n\n{text}") | {"model": model})
    assert found(bodies)[0] == []
    assert len(found([body | {"model": "a"} for body in bodies])[0]) == 1


def test_the_most_costly_comes_first() -> None:
    long = [system(f"[{n:08x}7f]\n\n{STABLE}{STABLE[::-1]}", f"{n}") for n in range(10, 20)]
    short = [numbered(1_000_000 + 7919 * n) for n in range(10)]
    findings, _ = found([body for pair in zip(short, long, strict=True) for body in pair])
    assert [finding.kind for finding in findings] == [Kind.OPAQUE_ID, Kind.NUMERIC_ID]
    assert findings[0].lost_tokens > findings[1].lost_tokens


def test_two_values_are_told_apart_by_what_each_costs() -> None:
    first, second = STABLE[: len(STABLE) // 2], STABLE[len(STABLE) // 2 :]
    bodies = [
        system(f"It is 12:{n:02}:01.\n\n{first}\n\nTicket {1_000_000 + 7919 * n}.\n\n{second}")
        for n in range(10, 20)
    ]
    findings, _ = found(bodies)
    assert {finding.kind for finding in findings} == {Kind.TIMESTAMP, Kind.NUMERIC_ID}
    for finding in findings:
        assert finding.lost_tokens_per_request == pytest.approx(len(first) / 4, rel=0.1)


def test_reading_stops_at_content() -> None:
    # The questions differ first; the time behind them is not what costs the hit.
    bodies = [
        system(f"{random.Random(n).sample(STABLE.split(), 30)}\n\nIt is 12:{n:02}.\n\n{STABLE}")
        for n in range(10, 20)
    ]
    assert found(bodies)[0] == []


def chat(*said: str) -> dict[str, Any]:
    """Returns a conversation: the system prompt, then user and assistant by turns."""
    roles = ("system", *("user", "assistant") * len(said))
    pairs = zip(roles, said, strict=False)
    return {"model": "m", "messages": [{"role": r, "content": text} for r, text in pairs]}


def test_a_user_who_says_no_more_than_a_name_is_content() -> None:
    names = ("Ada", "Boris", "Carla", "Dinh", "Elif", "Farid", "Gwen", "Hugo")
    greeting = "Good day! " + STABLE[:600]
    assert found([chat("Be kind.", name, greeting, f"{name}?") for name in names])[0] == []
    assert len(found([chat(f"You help {name}.\n{STABLE}", "?") for name in names])[0]) == 1


def test_the_same_output_in_two_conversations_is_no_history() -> None:
    output, bodies = STABLE[:800], []
    for n in range(16):
        said = ("Be kind.", f"{n * 7919:x} please", f"So {n * 104_729:x}.", output)
        bodies.append(chat(*said) if n % 2 == 0 else chat(*said, f"And {n * 31:x}.", "go on"))
    assert found(bodies)[0] == []


def test_outputs_that_share_a_line_are_in_no_other_order() -> None:
    assert score([clean_case("rollouts", seed=33)]).wrong == []


def test_each_turn_of_a_conversation_may_lose_anew() -> None:
    result = score(planted_case("history", seed=seed) for seed in (12, 25, 51, 129))
    assert result.wrong == []


def test_a_finding_that_costs_nothing_any_more_is_over() -> None:
    _, finder = found([numbered(1_000_000 + 7919 * n) for n in range(8)])
    assert len(finder.findings(now_s=7 + FORGET_S)) == 1
    assert finder.findings(now_s=8 + FORGET_S) == []


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finder_module, "MAX_PROMPTS", 20)
    monkeypatch.setattr(finder_module, "MAX_PROMPT_BYTES", 40_000)
    monkeypatch.setattr(finder_module, "MAX_SUSPECTS", 5)
    cache = EndlessCache(PlainPrompter(), block_size=16)
    finder = PrefixFinder(cache.count_tokens)
    for n in range(150):
        words = random.Random(n // 2).sample(STABLE.split(), 200)
        body = system(f"App {n // 2}: ticket {n:08}.\n\n{' '.join(words)}")
        _ = finder.look(cache.take(str(n), body).seen, now_s=0)
        assert len(finder._prompts) <= 20
        assert finder.num_bytes == sum(len(p.data) for p in finder._prompts.values()) <= 40_000
        assert len(finder._suspects) <= 5
    assert len(finder._suspects) == 5  # the bound was reached
    assert len(finder._prompts) >= 10


@given(st.lists(st.text(max_size=400), max_size=8), st.integers(0, 200))
def test_any_text_is_looked_at(texts: list[str], hit: int) -> None:
    finder = PrefixFinder(len)
    for number, text in enumerate(texts):
        data = text.encode("utf-8", "surrogatepass")
        for num_tokens in (len(text), 500):
            prompt = SeenPrompt(str(number), "m", data, (), num_tokens, min(hit, num_tokens))
            assert finder.look(prompt, now_s=0).proved == ()
