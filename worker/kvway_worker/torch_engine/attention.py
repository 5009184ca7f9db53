"""How the engine attends: by which implementation, and what of a step is read once for many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

import torch

from kvway_core.errors import ConfigError
from kvway_kernels.api import HEAD_STEP, PagedPlan, RequestRows, SharedRun, chosen, plan
from kvway_worker.load import AttentionReading
from kvway_worker.scheduling.prefix_groups import CascadeCosts, PrefixGroups, TableRow, paying
from kvway_worker.torch_engine.calls import Part

ALWAYS: Final = CascadeCosts(paged_key=1.0, run=0.0, run_key=0.0, run_pair=0.0, merge=0.0)
"""Costs with which every shared run pays."""


_COMPILED: Final = ("compiled", "triton")
"""Implementations that are compiled for the machine when they are first used."""


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What a worker was told about attention.

    Attributes:
        implementation: a name of `kvway_kernels.choice.IMPLEMENTATIONS`, or `auto`.
        compiles: let `auto` choose one that is compiled for this machine.
        cascade: read shared prefixes once where that costs less.
        costs: what attention costs here; None measures it.
    """

    implementation: str = "auto"
    compiles: bool = True
    cascade: bool = True
    costs: CascadeCosts | None = None

    @property
    def may_compile(self) -> bool:
        """Whether something may be compiled for this machine."""
        return self.implementation in _COMPILED or (
            self.implementation == "auto" and self.compiles
        )


PLAIN: Final = AttentionOptions("sdpa", compiles=False, cascade=False)
"""Nothing is compiled, measured or shared."""


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """What attends, and why.

    Attributes:
        implementation: its name.
        reason: why it was chosen.
        cascade: `on`, or why it is not.
    """

    implementation: str
    reason: str
    cascade: str

    @property
    def cascades(self) -> bool:
        """Whether shared prefixes may be read once."""
        return self.cascade == "on"

    @property
    def is_compiled(self) -> bool:
        """Whether it is compiled for this machine when it is first used."""
        return self.implementation in _COMPILED

    @classmethod
    def of(
        cls,
        options: AttentionOptions,
        *,
        device: torch.device,
        deterministic: bool,
        dtype: torch.dtype = torch.float32,
        is_quantised: bool = False,
        head_dim: int = HEAD_STEP,
    ) -> AttentionChoice:
        """Choose by the options, by what is in the cache, and by what this machine can run.

        Raises:
            ConfigError: what is asked for by name cannot run here.
        """
        asked = options.implementation
        if deterministic:
            if asked not in ("auto", "sdpa"):
                problem = f"--attention {asked} and --deterministic exclude each other: drop one"
                raise ConfigError([problem])
            return cls("sdpa", "--deterministic", "off: --deterministic")
        cascade = "on" if options.cascade else "off: --no-cascade"
        if asked == "auto" and not options.compiles:
            return cls("sdpa", "--no-compile", cascade)
        try:
            found = chosen(
                asked, device=device, dtype=dtype, is_quantised=is_quantised, head_dim=head_dim
            )
            return cls(*found, cascade)
        except ValueError as error:
            raise ConfigError([f"--attention {asked}: {error}"]) from error


class Attention:
    """Plans what each call of the model attends to, and counts what was read once.

    Rows that compute one token (decode, mostly) can be members of a shared run. Those that compute
    more read a prefix once for all their rows anyway.

    Args:
        choice: what attends.
        costs: decide which shared runs are read once; None shares nothing.
        num_blocks: blocks of the cache.
        block_size: tokens per block.
        device: where the cache is.
        dtype: what the model computes in.
        fixed_shapes: see `kvway_kernels.api.plan`.
    """

    def __init__(
        self,
        choice: AttentionChoice,
        *,
        costs: CascadeCosts | None,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        dtype: torch.dtype,
        fixed_shapes: bool = False,
    ) -> None:
        self._choice = choice
        self._costs = costs
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._device = device
        self._dtype = dtype
        self._fixed_shapes = fixed_shapes
        self._groups = PrefixGroups(block_size)
        self._is_new_step = True
        self._num_shared_steps = 0
        self._num_passes = 0
        self._num_tokens_once = 0
        self._num_tokens_saved = 0

    def begin_step(self) -> None:
        """Take note that the calls planned from now on are of another step."""
        self._is_new_step = True

    def plan(self, parts: Sequence[Part]) -> PagedPlan:
        """Plan one call of the model."""
        shared = () if self._costs is None else self._shared(parts, self._costs)
        return plan(
            [RequestRows(part.num_tokens, part.end, part.row.block_table) for part in parts],
            num_blocks=self._num_blocks,
            block_size=self._block_size,
            device=self._device,
            dtype=self._dtype,
            fixed_shapes=self._fixed_shapes,
            shared=shared,
            implementation=self._choice.implementation,
        )

    def read(self) -> AttentionReading:
        """Return what attends, and what was read once since the engine was loaded."""
        return AttentionReading(
            implementation=self._choice.implementation,
            reason=self._choice.reason,
            cascade=self._choice.cascade,
            num_shared_steps=self._num_shared_steps,
            num_passes=self._num_passes,
            num_tokens_once=self._num_tokens_once,
            num_tokens_saved=self._num_tokens_saved,
            costs_s={} if self._costs is None else asdict(self._costs),
        )

    def _shared(self, parts: Sequence[Part], costs: CascadeCosts) -> tuple[SharedRun, ...]:
        rows = [
            TableRow(part.row.seq.request_id, part.row.block_table, part.start, part.end)
            if part.num_tokens == 1
            else None
            for part in parts
        ]
        runs = paying(self._groups.update(rows), costs, block_size=self._block_size)
        if runs and self._is_new_step:
            self._is_new_step = False
            self._num_shared_steps += 1
        for run in runs:
            num_tokens = run.num_blocks * self._block_size
            self._num_passes += 1
            self._num_tokens_once += num_tokens
            self._num_tokens_saved += num_tokens * (len(run.members) - 1)
        return tuple(SharedRun(*run) for run in runs)
