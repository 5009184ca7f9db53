"""What cascade attention costs on this machine: measured once, then kept in a file."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Final

import msgspec
import structlog
import torch

from kvway_kernels.costs import Costs, HeadShape, calibrate
from kvway_worker.scheduling.prefix_groups import CascadeCosts
from kvway_worker.torch_engine.compiling import told
from kvway_worker.torch_engine.processor import processor_name

_VERSION: Final = 2
"""Of the file, and of what is timed and how: others are measured again."""

_log: Final = structlog.get_logger()


class Setting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What costs depend on.

    Attributes:
        processor: model of the CPU, or of the GPU.
        num_threads: that compute on the CPU.
        torch_version: of the library that computes.
        implementation: what attends.
        num_heads: of queries, per layer.
        num_kv_heads: of keys and values.
        head_dim: size of each.
        dtype: of queries, and of keys and values that are not quantised.
        kv_dtype: of keys and values in the cache.
        version: of the measurement.
    """

    processor: str
    num_threads: int
    torch_version: str
    implementation: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    kv_dtype: str
    version: int = _VERSION

    @classmethod
    def here(
        cls,
        shape: HeadShape,
        *,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        device: torch.device,
        implementation: str,
    ) -> Setting:
        """Return the setting of this process."""
        return cls(
            processor=_processor(device),
            num_threads=torch.get_num_threads(),
            torch_version=str(torch.__version__),
            implementation=implementation,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=str(dtype).removeprefix("torch."),
            kv_dtype=str(kv_dtype).removeprefix("torch."),
        )

    def file(self, folder: Path) -> Path:
        """Return where the costs of this setting are kept."""
        return folder / f"{sha256(msgspec.json.encode(self)).hexdigest()[:16]}.json"


class _Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    setting: Setting
    costs: Costs


def cascade_costs(
    shape: HeadShape,
    *,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    device: torch.device,
    implementation: str,
    folder: Path,
) -> CascadeCosts:
    """Return what attention costs here, from the file of an earlier start, else measured.

    Args:
        shape: heads of the model's layers.
        dtype: of queries.
        kv_dtype: of keys and values in the cache; None: the same.
        device: where they are.
        implementation: what attends: a name, not `auto`.
        folder: where files are kept, one per setting; made if it is not there.
    """
    setting = Setting.here(
        shape,
        dtype=dtype,
        kv_dtype=kv_dtype or dtype,
        device=device,
        implementation=implementation,
    )

    def measure() -> Costs:
        return calibrate(
            shape, dtype=dtype, kv_dtype=kv_dtype, device=device, implementation=implementation
        )

    return kept(setting, folder=folder, measure=measure)


def kept(setting: Setting, *, folder: Path, measure: Callable[[], Costs]) -> CascadeCosts:
    """Return the costs in a setting's file; where there is none or a bad one, measure and write.

    A file appears whole or not at all. One that cannot be written is logged: the next start
    measures again. How long it took is logged, too.
    """
    path = setting.file(folder)
    costs = _read(path, setting)
    source: dict[str, object] = {"from": "file"}
    if costs is None:
        started_s = time.monotonic()
        with told("measuring_attention", implementation=setting.implementation):
            costs = measure()
        source = {"from": "measured", "duration_s": round(time.monotonic() - started_s, 2)}
        _write(path, _Kept(setting, costs))
    _log.info(
        "attention_costs",
        **{name: f"{value:.3g}" for name, value in msgspec.to_builtins(costs).items()},
        **source,
        path=str(path),
    )
    return CascadeCosts(
        paged_key=costs.paged_key,
        run=costs.run,
        run_key=costs.run_key,
        run_pair=costs.run_pair,
        merge=costs.merge,
    )


def _read(path: Path, setting: Setting) -> Costs | None:
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_Kept)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        _log.warning("attention_costs_unreadable", path=str(path), error=str(error))
        return None
    values = msgspec.structs.astuple(found.setting), msgspec.to_builtins(found.costs).values()
    if values[0] != msgspec.structs.astuple(setting) or min(values[1]) < 0:
        _log.warning("attention_costs_unreadable", path=str(path), error="of another setting")
        return None
    return found.costs


def _write(path: Path, content: _Kept) -> None:
    # A name of this process's own; `open` gives it the rights that files of this user have.
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            draft.write_bytes(msgspec.json.encode(content))
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        _log.warning("attention_costs_not_kept", path=str(path), error=str(error))


def _processor(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()
