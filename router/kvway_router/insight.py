"""What the page shows beyond the fleet as it is now: the last hour, and the tree of prefixes."""

from __future__ import annotations

import asyncio
import random
from typing import Final

from kvway_core.clock import Clock
from kvway_router.admission import Admission
from kvway_router.fleet import Fleet
from kvway_router.history import STEP_S, Gauges, History, HistoryView
from kvway_router.index import BlockIndex
from kvway_router.outline import Outline, Outliner
from kvway_router.recent import RecentPrompts
from kvway_router.replica import ReplicaState
from kvway_router.trips import Trip

_FAILED: Final = ("failed", "shut_down")


class Insight:
    """Watches the traffic, and makes pictures of it when someone asks.

    Args:
        fleet: The replicas and what was counted of them.
        index: Who holds which blocks.
        recent: The prompts of late.
        admission: Who waits in the router.
        clock: Tells the time.
        block_size: Tokens per block.
    """

    def __init__(
        self,
        *,
        fleet: Fleet,
        index: BlockIndex,
        recent: RecentPrompts,
        admission: Admission,
        clock: Clock,
        block_size: int,
    ) -> None:
        """Nothing has happened yet."""
        self._fleet = fleet
        self._index = index
        self._recent = recent
        self._admission = admission
        self._clock = clock
        self._block_size = block_size
        self._history = History(clock.time(), rng=random.Random())  # noqa: S311  not a secret
        recent.mark(index.tick, clock.monotonic())

    def ended(self, trip: Trip) -> None:
        """Takes in a request that has ended."""
        if trip.finish in _FAILED or (trip.status or 0) >= 500:
            self._history.saw_failure()
        if trip.is_event_stream and trip.status == 200 and trip.ttft_s is not None:
            self._history.saw_ttft(trip.ttft_s)

    async def run(self) -> None:
        """Takes a sample at every step until cancelled."""
        while True:
            await asyncio.sleep(STEP_S)
            self.sample()

    def sample(self) -> None:
        """Ends a step of the history."""
        view = self._fleet.view()
        gauges = Gauges(
            in_flight={replica.replica_id: replica.in_flight for replica in view.replicas},
            waiting=self._admission.num_waiting,
            queued_prefill_s=sum(replica.queued_prefill_s for replica in view.replicas),
            ready=sum(replica.state == ReplicaState.READY for replica in view.replicas),
        )
        traffic = self._fleet.traffic
        counts = {replica.replica_id: traffic.of(replica.replica_id) for replica in view.replicas}
        self._history.sample(self._clock.time(), view.totals, gauges, counts)
        self._recent.mark(self._index.tick, self._clock.monotonic())

    def history(self, *, since_s: float) -> HistoryView:
        """Returns the samples after `since_s`, Unix seconds, and the replicas of late."""
        traffic = self._fleet.traffic
        names = [replica.replica_id for replica in self._fleet.view().replicas]
        return self._history.view({name: traffic.of(name) for name in names}, since_s=since_s)

    def tree(self, root: int | None) -> Outline:
        """Returns the tree of prefixes, from the run on that has `root` if that is a hash.

        Raises:
            LookupError: Nobody holds it.
        """
        capacities = {
            replica.replica_id: replica.blocks_total
            for replica in self._fleet.view().replicas
            if replica.blocks_total
        }
        outliner = Outliner(
            *self._index.parts(),
            self._recent,
            capacities=capacities,
            block_size=self._block_size,
            now_s=self._clock.monotonic(),
        )
        return outliner.outline(root)
