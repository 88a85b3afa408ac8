"""Reading one rank's share of a checkpoint: slice by slice, dequantised, one tensor in memory beside the result."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dsv4dist.checkpoint.index import TensorEntry
from dsv4dist.checkpoint.names import stacked_name
from dsv4dist.checkpoint.parameters import Parameter, Role
from dsv4dist.checkpoint.sources import CheckpointSummary, Encoding, Source, check_checkpoint, find_sources
from dsv4dist.config.model import ModelConfig
from dsv4dist.distributed.shard import shard_shape, shard_slices
from dsv4dist.distributed.tp import TpInfo, check_tp_size
from dsv4dist.errors import CheckpointError
from dsv4dist.kernels.fp8 import (
    FP4_BLOCK,
    WEIGHT_BLOCK,
    decode_scale_byte,
    dequantise_block_fp8,
    dequantise_fp4,
    ocp_bytes_to_fnuz,
)
from dsv4dist.kernels.paged_cache import Fp8Format


@dataclass
class LoadedParameters:
    """One rank's parameters by release name; routed experts are stacked per layer."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    skipped_draft_tensors: int = 0
    unknown_names: tuple[str, ...] = ()
    bytes_read: int = 0


def load_parameters(
    directory: Path,
    config: ModelConfig,
    tp: TpInfo,
    dtype: torch.dtype,
    device: torch.device,
    num_draft_layers: int = 0,
    keep_fp8: Fp8Format | None = None,
) -> LoadedParameters:
    """Load this rank's slice of every parameter of the main model, and of the first draft layers, onto `device`.

    Keys are release names. Matrices come in `dtype`, exact parameters in fp32, index tables in int64. Routed experts
    are stacked: `layers.N.ffn.experts.w1.weight` and `.w3.weight` [E, I/n, D], `.w2.weight` [E, D, I/n]. Every tensor
    owns its memory; none refers to the files afterwards.

    keep_fp8  the encoding in which attention's projections that are stored as fp8 stay fp8, if their share is made of
              whole blocks: `<name>.weight` then comes with `<name>.scale`, fp32 [rows / 128, columns / 128]
    Raises: ConfigError for a group size that does not divide the model; CheckpointError with all missing, unexpected,
    mis-shaped and mistyped tensors, before any data is read, or naming the tensor whose data is unusable.
    """
    check_tp_size(config, tp.size)
    summary = find_sources(directory, config, num_draft_layers)
    loaded = LoadedParameters(skipped_draft_tensors=summary.skipped_draft_tensors, unknown_names=summary.unknown_names)
    with _TensorFiles() as files:
        for source in summary.sources:
            if keep_fp8 is not None and _may_stay_fp8(source, tp):
                _load_fp8(loaded.tensors, source, tp, files, device, keep_fp8)
                continue
            target = _target(loaded.tensors, source.parameter, config, tp, dtype, device)
            _fill(target, source, tp, files)
            if source.parameter.role is Role.INDEX:
                _check_expert_ids(source.entry, target, config)
        loaded.bytes_read = files.bytes_read
    return loaded


def local_shape(parameter: Parameter, tp: TpInfo) -> tuple[int, ...]:
    """The shape of this rank's slice of a parameter, before experts are stacked."""
    return shard_shape(parameter.shape, parameter.shard, tp)


def _target(
    tensors: dict[str, Tensor],
    parameter: Parameter,
    config: ModelConfig,
    tp: TpInfo,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """The memory that a parameter is read into: its own tensor, or its expert's part of the stacked one."""
    types = {Role.MATRIX: dtype, Role.LINEAR: dtype, Role.EXACT: torch.float32, Role.INDEX: torch.int64}
    shape, kind = local_shape(parameter, tp), types[parameter.role]
    place = stacked_name(parameter.name)
    if place is None:
        return tensors.setdefault(parameter.name, torch.empty(shape, dtype=kind, device=device))
    if place.key not in tensors:
        tensors[place.key] = torch.empty((config.n_routed_experts, *shape), dtype=kind, device=device)
    return tensors[place.key][place.expert]


def _fill(target: Tensor, source: Source, tp: TpInfo, files: _TensorFiles) -> None:
    parameter = source.parameter
    window = shard_slices(parameter.shape, parameter.shard, tp)
    if source.encoding is Encoding.PLAIN:
        if source.expert is not None:
            rows = slice(window[0].start + source.first_row, window[0].stop + source.first_row)
            window = (slice(source.expert, source.expert + 1), rows, window[1])
        piece = files.read(source.entry, window)
        target.copy_(piece[0] if source.expert is not None else piece)
        return
    assert source.scale is not None, "quantised sources have a scale"
    rows, columns = window
    fp8 = source.encoding is Encoding.FP8_BLOCK
    # Whole blocks around the wanted part are read, so that every scale belongs to one block of what is dequantised.
    row_block, column_block = (WEIGHT_BLOCK, WEIGHT_BLOCK) if fp8 else (1, FP4_BLOCK)
    wide_rows = _widened(rows, row_block, parameter.shape[0])
    wide_columns = _widened(columns, column_block, parameter.shape[1])
    stored_columns = wide_columns if fp8 else slice(wide_columns.start // 2, wide_columns.stop // 2)
    data = files.read(source.entry, (wide_rows, stored_columns)).to(target.device)
    scale = files.read(source.scale, (_blocks(wide_rows, row_block), _blocks(wide_columns, column_block)))
    _check_scale(source.scale, scale)
    values = (dequantise_block_fp8 if fp8 else dequantise_fp4)(data, scale.to(target.device))
    target.copy_(
        values[
            rows.start - wide_rows.start : rows.stop - wide_rows.start,
            columns.start - wide_columns.start : columns.stop - wide_columns.start,
        ]
    )


def _may_stay_fp8(source: Source, tp: TpInfo) -> bool:
    parameter = source.parameter
    if parameter.role is not Role.LINEAR or source.encoding is not Encoding.FP8_BLOCK:
        return False
    window = shard_slices(parameter.shape, parameter.shard, tp)
    return all(part.start % WEIGHT_BLOCK == 0 and part.stop % WEIGHT_BLOCK == 0 for part in window)


def _load_fp8(
    tensors: dict[str, Tensor],
    source: Source,
    tp: TpInfo,
    files: _TensorFiles,
    device: torch.device,
    fp8_format: Fp8Format,
) -> None:
    """Read a share of whole blocks as it is stored, or as the other encoding's bytes, with fp32 scales."""
    assert source.scale is not None, "quantised sources have a scale"
    rows, columns = shard_slices(source.parameter.shape, source.parameter.shard, tp)
    data = files.read(source.entry, (rows, columns)).to(device, copy=True)
    stored = files.read(source.scale, (_blocks(rows, WEIGHT_BLOCK), _blocks(columns, WEIGHT_BLOCK)))
    _check_scale(source.scale, stored)
    scale = (stored if stored.dtype == torch.float32 else decode_scale_byte(stored)).to(device, copy=True)
    if fp8_format is Fp8Format.FNUZ:
        data, scale = ocp_bytes_to_fnuz(data), 2 * scale
    tensors[source.parameter.name] = data.view(fp8_format.torch_dtype)
    tensors[source.parameter.name.removesuffix("weight") + "scale"] = scale


def _widened(part: slice, block: int, size: int) -> slice:
    return slice(part.start // block * block, min(-(-part.stop // block) * block, size))


def _blocks(part: slice, block: int) -> slice:
    return slice(part.start // block, -(-part.stop // block))


def _check_scale(entry: TensorEntry, scale: Tensor) -> None:
    bad = ~scale.isfinite() if scale.dtype == torch.float32 else scale.view(torch.uint8) == 255
    if bool(bad.any()):
        raise CheckpointError(
            f"{entry.file}: scale {entry.name} holds NaN or infinity; fetch or convert the file again"
        )


def _check_expert_ids(entry: TensorEntry, table: Tensor, config: ModelConfig) -> None:
    low, high = int(table.min()), int(table.max())
    if low < 0 or high >= config.n_routed_experts:
        raise CheckpointError(
            f"{entry.file}: {entry.name} names experts {low} to {high}; there are {config.n_routed_experts}"
        )


class _TensorFiles:
    """Open safetensors files, each opened once; counts the bytes of what was read."""

    def __init__(self) -> None:
        self.bytes_read = 0
        self._open: dict[Path, Any] = {}
        self._handles = ExitStack()

    def __enter__(self) -> _TensorFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handles.close()

    def read(self, entry: TensorEntry, window: tuple[slice, ...]) -> Tensor:
        """One part of a stored tensor; it may refer to the file's memory, so copy what is to stay."""
        try:
            if entry.file not in self._open:
                self._open[entry.file] = self._handles.enter_context(safe_open(entry.file, framework="pt"))
            piece: Tensor = self._open[entry.file].get_slice(entry.name)[window]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{entry.file}: tensor {entry.name} cannot be read ({error})") from None
        self.bytes_read += piece.numel() * piece.element_size()
        return piece


__all__ = ["CheckpointSummary", "LoadedParameters", "check_checkpoint", "load_parameters", "local_shape"]
