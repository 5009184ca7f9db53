"""The tree of prefixes as the page draws it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvway_router import outline, recent
from kvway_router.index import BlockIndex
from kvway_router.outline import MAX_BRANCHES, Branch, Outline, Outliner
from kvway_router.recent import RecentPrompts, SentPrompt
from tests.router.conftest import Bench

SYSTEM = list(range(1, 5))
CHAT_A = [*SYSTEM, 11, 12]
CHAT_B = [*SYSTEM, 21]


class World:
    """An index and its traffic, at a time that the test sets."""

    def __init__(self, limit: int = 1000) -> None:
        self.index = BlockIndex(max_blocks_per_replica=limit)
        self.recent = RecentPrompts()
        self.now_s = 0.0
        self.recent.mark(self.index.tick, self.now_s)

    def later(self, seconds: float) -> None:
        self.recent.mark(self.index.tick, self.now_s)
        self.now_s += seconds

    def sent(self, name: str, hashes: Sequence[int], *, request_id: str = "r") -> int:
        self.index.store(name, None, hashes)
        return self.recent.add(SentPrompt(request_id, name, hashes))

    def outline(self, root: int | None = None) -> Outline:
        outliner = Outliner(
            *self.index.parts(), self.recent,
            capacities={}, block_size=16, now_s=self.now_s,
        )  # fmt: skip
        return outliner.outline(root)


def by_id(view: Outline) -> dict[int, Branch]:
    return {int(branch.id, 16): branch for branch in view.branches}


def test_runs_are_told_with_their_place_their_traffic_and_their_holders() -> None:
    world = World()
    world.sent("a:1", CHAT_A, request_id="r1")
    world.sent("a:1", CHAT_A, request_id="r2")
    world.sent("b:1", CHAT_B, request_id="r3")
    view = world.outline()
    runs = by_id(view)
    assert set(runs) == {1, 11, 21}
    assert view.branches[0].id == f"{1:016x}"
    system, a, b = runs[1], runs[11], runs[21]
    assert (system.parent, a.parent, b.parent) == (-1, 0, 0)
    assert (system.start, system.tokens, a.start, a.tokens) == (0, 64, 64, 32)
    assert (system.requests, a.requests, b.requests) == (3, 2, 1)
    assert system.held_tokens == 64 + 32 + 16
    assert system.sent_tokens == view.prompt_tokens == 16 * (6 + 6 + 5)
    assert system.sharers == ["r3", "r2", "r1"]
    names = [view.replicas[holder.replica] for holder in system.holders]
    assert names == ["a:1", "b:1"]
    assert [holder.tokens for holder in a.holders] == [32]
    assert (view.prompts, view.blocks, view.hidden) == (3, 7, 0)


def test_the_picture_begins_where_it_is_asked_to() -> None:
    world = World()
    world.sent("a:1", CHAT_A)
    world.sent("a:1", CHAT_B)
    view = world.outline(11)
    (only,) = view.branches
    assert (only.id, only.parent, only.start) == (f"{11:016x}", -1, 64)
    assert (view.root, view.hidden) == (f"{11:016x}", 0)
    with pytest.raises(LookupError):
        world.outline(99)


def test_what_is_not_shown_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outline, "MAX_BRANCHES", 2)
    world = World()
    for number in range(5):
        world.index.store("a:1", None, [*SYSTEM, 100 + number])
    world.sent("a:1", [*SYSTEM, 104])
    world.index.store("a:1", None, [900])
    view = world.outline()
    assert set(by_id(view)) == {1, 104}  # the traffic comes first
    assert by_id(view)[1].hidden == 4
    assert view.hidden == 1
    assert by_id(view)[1].held_tokens == 16 * (4 + 5)


def test_the_traffic_is_shown_however_many_idle_runs_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outline, "MAX_VISITED", 4)
    world = World()
    for number in range(50):
        world.index.store("a:1", None, [1000 + number])
    world.sent("a:1", CHAT_A)
    runs = by_id(world.outline())
    assert len(runs) == 4
    assert runs[1].requests == 1
    assert MAX_BRANCHES <= 400


def test_what_waits_for_blocks_that_nobody_holds_is_no_beginning() -> None:
    world = World()
    world.index.store("a:1", 7, [8, 9])
    world.recent.add(SentPrompt("r", "a:1", [6, 7, 8, 9]))
    assert world.outline().branches == []


def test_what_is_cold_is_told_how_long_it_will_stay() -> None:
    world = World(limit=10)
    world.index.store("a:1", None, [1, 2, 3, 4])
    world.later(100)
    assert by_id(world.outline())[1].holders[0].left_s is None  # there is room
    world.index.store("a:1", None, [11, 12, 13])
    world.later(20)
    world.index.store("a:1", None, [21, 22, 23])
    world.later(1)
    runs = by_id(world.outline())
    idle = {name: run.holders[0].idle_s for name, run in runs.items()}
    left = {name: run.holders[0].left_s for name, run in runs.items()}
    assert idle == {1: 121.0, 11: 21.0, 21: 1.0}
    # What goes next was used 121 s ago.
    assert left == {1: 0.0, 11: 100.0, 21: 120.0}


def test_a_replica_that_has_fewer_blocks_than_allowed_is_full_sooner() -> None:
    world = World()
    world.index.store("a:1", None, [1, 2, 3, 4])
    world.later(5)
    outliner = Outliner(
        *world.index.parts(), world.recent, capacities={"a:1": 4}, block_size=16, now_s=5.0
    )
    assert outliner.outline(None).branches[0].holders[0].left_s == 0.0


def test_the_ceiling_counts_what_was_sent_before_to_whomever() -> None:
    world = World(limit=4)
    assert world.sent("a:1", CHAT_A) == 0
    assert world.sent("b:1", CHAT_B) == 4
    world.index.remove_replica("a:1")
    assert world.sent("b:1", CHAT_A) == 6
    assert world.sent("b:1", []) == 0


def test_prompts_and_marks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent, "MAX_PROMPTS", 4)
    monkeypatch.setattr(recent, "MAX_BLOCKS", 10)
    kept = RecentPrompts()
    for number in range(9):
        kept.add(SentPrompt(str(number), "a:1", [number]))
    assert [prompt.request_id for prompt in kept] == ["5", "6", "7", "8"]
    kept.add(SentPrompt("long", "a:1", list(range(100, 108))))
    assert [prompt.request_id for prompt in kept] == ["7", "8", "long"]
    kept.add(SentPrompt("longer", "a:1", list(range(200, 220))))
    assert [prompt.request_id for prompt in kept] == ["longer"]
    for number in range(recent.MAX_MARKS + 5):
        kept.mark(number, float(number))
    assert kept.age_s(4, 1000.0) is None
    assert kept.age_s(5, 1000.0) == 1000.0 - 6
    assert kept.age_s(10**6, 1000.0) == 0.0


async def test_the_tree_is_told_over_http(bench: Bench) -> None:
    _, headers, _ = await bench.chat("y" * 200)
    view = await bench.get(bench.admin("/admin/tree"))
    (run,) = view["branches"]
    assert view["replicas"] == [bench.replica.replica_id]
    assert run["sharers"] == [headers["x-kvway-request-id"]]
    assert run["tokens"] == view["prompt_tokens"]
    assert await bench.get(bench.admin(f"/admin/tree?root={run['id']}")) == view | {
        "root": run["id"]
    }


@pytest.mark.parametrize(("root", "status"), [("0" * 16, 404), ("1", 400), ("g" * 16, 400)])
async def test_a_root_that_is_none_is_refused(bench: Bench, root: str, status: int) -> None:
    async with bench.client.get(bench.admin(f"/admin/tree?root={root}")) as response:
        assert response.status == status
        assert (await response.json())["error"]["param"] == "root"
