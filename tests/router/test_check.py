"""`kvway check`: every form of file, the report, the exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from kvway_core.errors import ConfigError
from kvway_core.testing.byte_model import write_byte_model
from kvway_router.check import CheckOptions, check, run
from kvway_router.check_files import Logged, NotRequest, read_requests
from kvway_router.check_prompts import PlainPrompter
from kvway_router.check_report import picture, stranded
from kvway_router.prefixes.comparing import Loss
from kvway_router.prefixes.seen import SeenPrompt
from kvway_router.prefixes.values import Kind

STABLE = " ".join(f"Rule {n}: greet visitor {n * 37 % 101} kindly." for n in range(40))
SAID = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
BODY = {"model": "m", "messages": SAID}


def lines(path: Path, items: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


def killing(number: int) -> dict[str, Any]:
    system = {"role": "system", "content": f"Ticket {1_000_000 + 7919 * number}.\n{STABLE}"}
    return {"model": "m", "messages": [system, {"role": "user", "content": f"Why {number}?"}]}


def options(file: Path, **fields: Any) -> CheckOptions:
    given: dict[str, Any] = {
        "file": file,
        "model": None,
        "block_size": 16,
        "fail_over": None,
        "fix_hint": False,
        "show_values": False,
        "limit": 1000,
    }
    return CheckOptions(**given | fields)


@pytest.fixture
def killer_file(tmp_path: Path) -> Path:
    return lines(tmp_path / "killer.jsonl", map(killing, range(9)))


@pytest.mark.parametrize(
    ("item", "bodies"),
    [
        (BODY, [SAID]),
        ({"custom_id": "1", "method": "POST", "body": BODY}, [SAID]),
        ({"time": 1, "request": BODY, "response": {}}, [SAID]),
        ({"messages": [*SAID, {"role": "assistant", "content": "a"}]}, [SAID]),
        (
            {"conversations": [{"from": "human", "value": "u"}, {"from": "gpt", "value": "a"}]},
            [[{"role": "user", "content": "u"}]],
        ),
        (
            {"messages": [*SAID, {"role": "assistant", "content": "a"}] * 2},
            [SAID, [*SAID, {"role": "assistant", "content": "a"}, *SAID]],
        ),
    ],
)
def test_lines_hold_requests_in_many_forms(
    tmp_path: Path, item: dict[str, Any], bodies: list[Any]
) -> None:
    found = list(read_requests(lines(tmp_path / "f", [item, item])))
    messages = [entry.body["messages"] for entry in found if isinstance(entry, Logged)]
    assert messages == bodies * 2
    assert [entry.ref.partition(",")[0] for entry in found] == sorted(
        ["line 1", "line 2"] * len(bodies)
    )


def test_an_exported_conversation_is_read_along_its_last_branch(tmp_path: Path) -> None:
    def node(parent: str | None, role: str, text: str) -> dict[str, Any]:
        message = {"author": {"role": role}, "content": {"parts": [text]}}
        return {"parent": parent, "message": message}

    tree = {
        "root": {"parent": None, "message": None},
        "1": node("root", "user", "hello"),
        "2": node("1", "assistant", "first try"),
        "3": node("1", "assistant", "second try"),
        "4": node("3", "user", "more"),
        "5": node("4", "assistant", "end"),
    }
    path = tmp_path / "export.json"
    path.write_text(json.dumps([{"title": "t", "mapping": tree, "current_node": "5"}]))
    found = [entry for entry in read_requests(path) if isinstance(entry, Logged)]
    texts = [[message["content"] for message in entry.body["messages"]] for entry in found]
    assert texts == [["hello"], ["hello", "second try", "more"]]


def test_an_export_that_goes_in_a_circle_ends(tmp_path: Path) -> None:
    message = {"author": {"role": "user"}, "content": {"parts": ["hello"]}}
    tree = {"1": {"parent": "2", "message": message}, "2": {"parent": "1", "message": None}}
    path = tmp_path / "export.json"
    path.write_text(json.dumps({"mapping": tree, "current_node": "1"}))
    (found,) = read_requests(path)
    assert isinstance(found, Logged)
    assert found.body["messages"] == [{"role": "user", "content": "hello"}]


def test_a_har_holds_requests_among_others(tmp_path: Path) -> None:
    posted = {"request": {"method": "POST", "postData": {"text": json.dumps(BODY)}}}
    image = {"request": {"method": "GET", "url": "https://shop.example/a.png"}}
    path = tmp_path / "a.har"
    path.write_text(json.dumps({"log": {"entries": [image, posted]}}, indent=1))
    kinds = [type(entry) for entry in read_requests(path)]
    assert kinds == [NotRequest, Logged]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "neither JSON nor JSON lines"),
        ("hello", "neither JSON nor JSON lines"),
        ("[" * 100_000, "neither JSON nor JSON lines"),
        ('{"a": 1}\n{"b": 2}\n', "holds no request; line 1: neither messages nor a prompt"),
        ('{"messages": [1, 2]}\n', "holds no request; line 1: a message is not an object"),
        (
            '{"prompt": [1, 2]}\n',
            "holds no request; line 1: neither messages nor a prompt of text",
        ),
        ("[]", "holds no request"),
        ("[1, null]", "holds no request; item 1: not an object"),
    ],
)
def test_a_file_without_requests_is_refused(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "f"
    path.write_text(text)
    with pytest.raises(ConfigError, match=why):
        check(options(path))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.jsonl cannot be read: No such file"):
        run([str(tmp_path / "gone.jsonl")])


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="neither JSON nor JSON lines"):
        check(options(path))


def test_what_is_skipped_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = lines(tmp_path / "f", [BODY, {"a": 1}])
    path.write_text(path.read_text() + "{broken\n")
    assert run([str(path)]) == 0
    assert "2 skipped; the first: line 2: neither messages nor a prompt" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv",
    [
        ["--fail-over", "6"],
        ["--fail-over", "x%"],
        ["--fail-over", "nan"],
        ["--block-size", "0"],
        ["--block-size", "x"],
        ["--limit", "0"],
        ["--nonsense"],
    ],
)
def test_bad_options_are_refused_by_name(killer_file: Path, argv: list[str]) -> None:
    with pytest.raises(ConfigError, match=argv[0]):
        run([str(killer_file), *argv])


def test_the_report_names_the_killer_and_hides_it(
    killer_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([str(killer_file)]) == 0
    told = capsys.readouterr().out
    assert "1. a number that names something: 9999999" in told
    assert "at token 4, message 0 (system), character 7; line 6" in told
    assert "8 of 9 requests lose" in told
    assert "1000000" not in told
    assert "greet" not in told


def test_values_are_shown_when_asked_for(
    killer_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([str(killer_file), "--show-values"]) == 0
    assert f"something: {1_000_000 + 7919 * 5}" in capsys.readouterr().out


@pytest.mark.parametrize(("limit", "code"), [("5%", 1), ("0.05", 1), ("99%", 0), ("1", 0)])
def test_the_exit_code_is_for_ci(
    killer_file: Path, capsys: pytest.CaptureFixture[str], limit: str, code: int
) -> None:
    assert run([str(killer_file), "--fail-over", limit]) == code
    assert ("are avoidable; --fail-over allows" in capsys.readouterr().out) == bool(code)


def test_a_limit_cuts_and_says_so(killer_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([str(killer_file), "--limit", "3"]) == 0
    told = capsys.readouterr().out
    assert "3 requests" in told
    assert "the file has more requests" in told


def test_the_hint_moves_what_varies_behind_what_does_not(
    killer_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([str(killer_file), "--fix-hint"]) == 0
    told = capsys.readouterr().out
    stable = told.index("the same each time, with no {numeric_id}")
    assert told.index("as it should be") < stable
    assert stable < told.index("{numeric_id}, at the front of message 1")


def test_a_picture_shows_each_block() -> None:
    prompt = SeenPrompt("line 1", "m", b"x" * 1280, (), 320, 64)
    loss = Loss(Kind.DATE, begin=260, end=270, resumes=448, until=960, lost_bytes=512)
    shown = picture(prompt, [loss], 16)
    assert shown == "████▼··" + "░" * 8 + "·" * 5 + "  line 1: 320 tokens"


def test_a_long_picture_is_drawn_smaller() -> None:
    shown = picture(SeenPrompt("line 1", "m", b"x" * 40_960, (), 10_240, 10_240), [], 16)
    assert shown == "█" * 64 + "  line 1: 10,240 tokens, 10 blocks a column"


def test_a_model_counts_and_renders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_byte_model(tmp_path / "bytes")
    path = lines(tmp_path / "f", map(killing, range(9)))
    assert run([str(path), "--model", str(folder)]) == 0
    told = capsys.readouterr().out
    assert "(counted)" in told
    assert f"at token {1 + len('system') + 1 + len('Ticket ')}, message 0" in told


@pytest.mark.parametrize(("padding", "held"), [("", 63 * 16), ("....", 1024)])
def test_a_block_boundary_strands_tokens_and_padding_saves_them(
    tmp_path: Path, padding: str, held: int
) -> None:
    folder = write_byte_model(tmp_path / "bytes")
    shared = "".join(f"{n:04}" for n in range(255)) + padding  # 1,020 bytes are 1,020 tokens
    prompts = [shared + f"{n % 10}{n:x}" * 30 for n in range(5)]
    path = lines(tmp_path / "f", [{"model": "m", "prompt": prompt} for prompt in prompts])
    checked = check(options(path, model=str(folder)))
    assert [prompt.seen.hit_tokens for prompt in checked.prompts] == [0] + [held] * 4
    assert stranded(checked) == ([] if padding else [(1020, 4)])


def test_the_boundary_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_byte_model(tmp_path / "bytes")
    shared = "".join(f"{n:04}" for n in range(255))
    prompts = [shared + f"{n % 10}{n:x}" * 30 for n in range(5)]
    path = lines(tmp_path / "f", [{"model": "m", "prompt": prompt} for prompt in prompts])
    assert run([str(path), "--model", str(folder)]) == 0
    told = capsys.readouterr().out
    assert "4 requests share 1,020 tokens: 63 blocks of 16, and 12 tokens in a block" in told
    assert "4 tokens of padding behind the shared part would fill the block and save 48" in told


def test_estimated_tokens_part_where_texts_part() -> None:
    encode = PlainPrompter().encode
    a, b = encode("abcdefghij"), encode("abcdefghiX")
    assert len(a) == 3
    assert a[:2] == b[:2]
    assert a[2] != b[2]
    assert encode("") == []


@pytest.mark.e2e
def test_the_console_script_runs(killer_file: Path) -> None:
    program = Path(sys.executable).with_name("kvway")
    done = subprocess.run(
        [program, "check", str(killer_file), "--fail-over=5%"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert "a number that names something" in done.stdout
