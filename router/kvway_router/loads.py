"""The loads of all candidates as columns of numbers, so that one choice reckons with all at once.

Every term of the cost but the prices is linear in one number of the prompt, clipped or not:

    term                       number of the prompt           times        plus
    work per uncached token    u + 2c                         1 / (2 R A)  1 / R
    step                       k, its chunks                  tau          n tau
    least own time             k                              s - tau      0
    kv, before it is clipped   its blocks                     km / C       km (P / C - theta)

So two columns per term are kept of each replica. `Loads` is a value; one in which a few replicas
differ is made from the one before, and what did not change is copied, not reckoned again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import fsum
from typing import Final, overload

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from kvway_router.policy import PolicyParams, ReplicaLoad

Matrix = npt.NDArray[np.float64]

NUM_TERMS: Final = 4
"""Rows of `Loads.factors` and `Loads.summands`: see the table above."""
_NUM_ROWS: Final = 2 * NUM_TERMS + 1


class Loads(Sequence[ReplicaLoad]):
    """The load of each candidate, in any order. Not to be changed.

    Attributes:
        params: The constants that are in the columns.
        ids: The replicas.
        keys: The same as UTF-8, for hashes.
        queued_s: Q of each.
        queued: The same as a column.
        factors: What the numbers of the prompt are multiplied by: [`NUM_TERMS`, replicas].
        summands: What is added to the products: [`NUM_TERMS`, replicas].
        matrix: All columns: those three, one below the other.
        rate: R of those that show none.
        attention: A of those that show none.
        borrowed: Whether any has to borrow one of the two.
        failing: What failures of late cost each, as a column; None while there are none.

    Args:
        loads: The loads.
        params: The constants.
        before: Loads of the same replicas in the same order, by the same constants; who shows no
            R or A borrows what was borrowed there.
        changed: Where they differ from these.
    """

    __slots__ = (
        "_loads",
        "attention",
        "borrowed",
        "factors",
        "failing",
        "ids",
        "keys",
        "matrix",
        "params",
        "queued",
        "queued_s",
        "rate",
        "summands",
    )

    def __init__(
        self,
        loads: Sequence[ReplicaLoad],
        params: PolicyParams,
        *,
        before: Loads | None = None,
        changed: Iterable[int] = (),
    ) -> None:
        self._loads = list(loads)
        self.params = params
        if before is None:
            self.ids = [load.replica_id for load in loads]
            self.keys = [name.encode() for name in self.ids]
            rates = [rate for load in loads if (rate := load.prefill_tokens_per_s)]
            contexts = [context for load in loads if (context := load.attention_tokens)]
            self.borrowed = not len(rates) == len(contexts) == len(loads)
            self.rate = _mean(rates, params.default_prefill_tokens_per_s)
            self.attention = _mean(contexts, params.attention_tokens)
            self.matrix = columns_of(map(self._column, loads)).reshape(_NUM_ROWS, len(loads))
        else:
            self.ids, self.keys = before.ids, before.keys
            self.rate, self.attention = before.rate, before.attention
            self.borrowed = before.borrowed
            self.matrix = before.matrix.copy()
            for place in changed:
                self.matrix[:, place] = self._column(loads[place])
        self.factors = self.matrix[:NUM_TERMS]
        self.summands = self.matrix[NUM_TERMS:-1]
        self.queued = self.matrix[-1]
        self.queued_s: list[float] = self.queued.tolist()
        failing = [load.failing_s for load in loads]
        self.failing = np.array(failing) if any(failing) else None

    @classmethod
    def of(cls, loads: Sequence[ReplicaLoad], params: PolicyParams) -> Loads:
        """Returns loads with columns by these constants; the same ones if they are so already."""
        if isinstance(loads, Loads) and loads.params is params:
            return loads
        return cls(loads, params)

    def replaced(self, changes: Mapping[int, ReplicaLoad]) -> Loads:
        """Returns loads in which those at some places are others, of the same replicas."""
        loads = self._loads.copy()
        shown = False
        for place, load in changes.items():
            before, loads[place] = loads[place], load
            if (
                load.prefill_tokens_per_s != before.prefill_tokens_per_s
                or load.attention_tokens != before.attention_tokens
            ):
                shown = True
        if shown and (self.borrowed or not all(map(_is_known, changes.values()))):
            return Loads(loads, self.params)  # what one shows is what others borrow
        return Loads(loads, self.params, before=self, changed=changes)

    @override
    def __len__(self) -> int:
        return len(self._loads)

    @override
    def __iter__(self) -> Iterator[ReplicaLoad]:
        return iter(self._loads)

    @overload
    def __getitem__(self, place: int) -> ReplicaLoad: ...

    @overload
    def __getitem__(self, place: slice) -> list[ReplicaLoad]: ...

    @override
    def __getitem__(self, place: int | slice) -> ReplicaLoad | list[ReplicaLoad]:
        return self._loads[place]

    def _column(self, load: ReplicaLoad) -> tuple[float, ...]:
        """Returns what is reckoned with of one replica."""
        params, tau = self.params, load.decode_step_s
        token_s = 1.0 / (load.prefill_tokens_per_s or self.rate)
        block_s = params.kv_weight_s / load.blocks_total if load.blocks_total else 0.0
        taken_s = load.blocks_pinned * block_s - params.kv_weight_s * params.kv_threshold
        return (
            token_s / (2.0 * (load.attention_tokens or self.attention)),
            tau,
            load.least_step_s - tau,
            block_s,
            token_s,
            load.num_prefills * tau,
            0.0,
            taken_s if load.blocks_total else 0.0,
            load.queued_prefill_s,
        )


def _is_known(load: ReplicaLoad) -> bool:
    """Tells whether a load has nothing to borrow."""
    return bool(load.prefill_tokens_per_s and load.attention_tokens)


def _mean(values: Sequence[float], default: float) -> float:
    return fsum(values) / len(values) if values else default


def columns_of(rows: Iterable[tuple[float, ...]]) -> Matrix:
    """Returns rows of equal length as the columns of a matrix, one row of it after the other."""
    return np.array(list(zip(*rows, strict=True)), dtype=np.float64)
