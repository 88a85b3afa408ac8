"""Where each parameter of a configuration lies in a checkpoint, decided from headers before any data is read."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from pathlib import Path

from dsv4dist.checkpoint.index import CheckpointIndex, TensorEntry, list_names, open_index
from dsv4dist.checkpoint.names import (
    FUSED_DOWN,
    FUSED_GATE_UP,
    SCALE_SUFFIXES,
    is_draft_name,
    other_names,
    release_name,
    release_scale_name,
    stacked_name,
)
from dsv4dist.checkpoint.parameters import Parameter, Role, Storage, draft_parameters, model_parameters
from dsv4dist.config.model import ModelConfig
from dsv4dist.errors import CheckpointError, one_error
from dsv4dist.kernels.fp8 import FP4_BLOCK, WEIGHT_BLOCK

logger = logging.getLogger(__name__)

_FLOATS = ("F32", "BF16", "F16")
_INTEGERS = ("I64", "I32")
_SCALES = ("F8_E8M0", "U8", "F32")


class Encoding(Enum):
    """How the bytes of a stored tensor become numbers."""

    PLAIN = "plain"
    FP8_BLOCK = "fp8"  # e4m3, one scale per 128x128
    FP4_BLOCK = "fp4"  # e2m1 pairs, one scale per row and 32 columns


@dataclass(frozen=True)
class Source:
    """Where one parameter's full matrix lies: all of `entry`, or rows of one expert of a fused tensor."""

    parameter: Parameter
    entry: TensorEntry
    encoding: Encoding = Encoding.PLAIN
    scale: TensorEntry | None = None
    expert: int | None = None  # index in dimension 0 of a fused tensor
    first_row: int = 0


@dataclass(frozen=True)
class CheckpointSummary:
    """What a checkpoint holds for its configuration."""

    sources: tuple[Source, ...]
    num_files: int
    num_tensors: int
    num_bytes: int
    skipped_draft_tensors: int
    unknown_names: tuple[str, ...]
    """Stored tensors that no parameter has a use for; they are not read."""


class _Problems:
    """Names by kind of problem, told together."""

    def __init__(self) -> None:
        self.by_kind: dict[str, list[str]] = {}

    def add(self, kind: str, name: str) -> None:
        self.by_kind.setdefault(kind, []).append(name)

    def texts(self) -> list[str]:
        return [f"{kind} ({len(names)}): {list_names(names)}" for kind, names in self.by_kind.items()]


def check_checkpoint(directory: Path, config: ModelConfig, num_draft_layers: int = 0) -> CheckpointSummary:
    """Find every parameter of `config` in `directory` by headers alone, so that errors come before any rank starts.

    Logs the unknown names once.  Raises: CheckpointError with every missing, unexpected, mis-shaped or mistyped tensor.
    """
    summary = find_sources(directory, config, num_draft_layers)
    if summary.unknown_names:
        names = list(summary.unknown_names)
        logger.warning("%s: %d tensors are not used: %s", directory, len(names), list_names(names))
    return summary


def find_sources(directory: Path, config: ModelConfig, num_draft_layers: int = 0) -> CheckpointSummary:
    """The same as `check_checkpoint` without a log line: what each rank does again before it reads.

    The parameters of the first `num_draft_layers` draft layers are asked for too; tensors of the others are skipped.
    """
    index = open_index(directory)
    problems = _Problems()
    drafts = (draft_parameters(config, draft) for draft in range(num_draft_layers))
    parameters = {parameter.name: parameter for parameter in chain(model_parameters(config), *drafts)}
    stored, scales, draft, unknown = _by_release_name(index, parameters, config, problems)
    if num_draft_layers and not any(is_draft_name(name) for name in stored):
        raise CheckpointError(f"{directory}: holds no draft layer (mtp.0); leave --speculative-tokens out")
    sources = []
    for parameter in parameters.values():
        source = _source_of(parameter, stored, scales, config, problems)
        if source is not None:
            sources.append(source)
    used = {source.entry.name for source in sources} | {source.scale.name for source in sources if source.scale}
    unknown += [entry.name for entry in (*stored.values(), *scales.values()) if entry.name not in used]
    if problems.by_kind:
        raise one_error(CheckpointError, str(directory), problems.texts())
    return CheckpointSummary(
        sources=tuple(sources),
        num_files=len(index.files),
        num_tensors=len(index.tensors),
        num_bytes=index.num_bytes,
        skipped_draft_tensors=draft,
        unknown_names=tuple(sorted(unknown)),
    )


def _by_release_name(
    index: CheckpointIndex, parameters: dict[str, Parameter], config: ModelConfig, problems: _Problems
) -> tuple[dict[str, TensorEntry], dict[str, TensorEntry], int, list[str]]:
    """Stored tensors and scales by release name of their parameter, the count of draft tensors, names without a use."""
    fused = {f"layers.{n}.{name}" for n in range(config.num_hidden_layers) for name in (FUSED_GATE_UP, FUSED_DOWN)}
    stored: dict[str, TensorEntry] = {}
    scales: dict[str, TensorEntry] = {}
    draft, unknown = 0, []
    for name, entry in sorted(index.tensors.items()):
        release, table = release_name(name), stored
        if release is None:
            release, table = release_scale_name(name), scales
        if is_draft_name(name) and release not in parameters:
            draft += 1
            continue
        if release is None:
            unknown.append(name)
        elif release not in parameters and release not in fused:
            problems.add("tensors that this config.json has no place for", name)
        elif release in table:
            problems.add("tensors stored under two names", f"{table[release].name} and {name}")
        else:
            table[release] = entry
    return stored, scales, draft, unknown


def _source_of(
    parameter: Parameter,
    stored: dict[str, TensorEntry],
    scales: dict[str, TensorEntry],
    config: ModelConfig,
    problems: _Problems,
) -> Source | None:
    entry = stored.get(parameter.name)
    if entry is None:
        return _fused_source(parameter, stored, config, problems)
    if parameter.role is Role.INDEX:
        return Source(parameter, entry) if _fits(entry, parameter.shape, _INTEGERS, problems) else None
    if entry.dtype == "F8_E4M3" and len(parameter.shape) == 2:
        scale_shape = tuple(-(-size // WEIGHT_BLOCK) for size in parameter.shape)
        return _scaled_source(parameter, entry, parameter.shape, scale_shape, Encoding.FP8_BLOCK, scales, problems)
    if entry.dtype in ("I8", "U8") and parameter.storage is Storage.FP4:
        rows, columns = parameter.shape
        packed, scale_shape = (rows, columns // 2), (rows, -(-columns // FP4_BLOCK))
        return _scaled_source(parameter, entry, packed, scale_shape, Encoding.FP4_BLOCK, scales, problems)
    # A sink that is neither fp32 nor bf16 was written by something that misread it (its scores would be off per head).
    allowed = ("F32", "BF16") if parameter.name.endswith(".attn_sink") else _FLOATS
    fits = _fits(entry, parameter.shape, allowed, problems, scaled=len(parameter.shape) == 2)
    return Source(parameter, entry) if fits else None


def _scaled_source(
    parameter: Parameter,
    entry: TensorEntry,
    shape: tuple[int, ...],
    scale_shape: tuple[int, ...],
    encoding: Encoding,
    scales: dict[str, TensorEntry],
    problems: _Problems,
) -> Source | None:
    scale = scales.get(parameter.name)
    if scale is None:
        stem = entry.name.removesuffix("weight")
        tried = " or ".join(stem + suffix for suffix in SCALE_SUFFIXES)
        problems.add("quantised tensors without their scale", f"{entry.name} ({entry.dtype}, needs {tried})")
        return None
    good = [_fits(entry, shape, (entry.dtype,), problems), _fits(scale, scale_shape, _SCALES, problems)]
    return Source(parameter, entry, encoding, scale) if all(good) else None


def _fused_source(
    parameter: Parameter, stored: dict[str, TensorEntry], config: ModelConfig, problems: _Problems
) -> Source | None:
    """The part of a fused expert tensor that is this expert's matrix."""
    place = stacked_name(parameter.name)
    if place is not None:
        layer, which = place.key.split("ffn.experts.")
        down = which == "w2.weight"
        entry = stored.get(layer + (FUSED_DOWN if down else FUSED_GATE_UP))
        if entry is not None:
            rows, columns = parameter.shape
            shape = (config.n_routed_experts, rows if down else 2 * rows, columns)
            # One report for the tensor is enough; it is shared by all experts.
            quiet = place.expert > 0 or which == "w3.weight"
            if not _fits(entry, shape, _FLOATS, _Problems() if quiet else problems):
                return None
            return Source(parameter, entry, expert=place.expert, first_row=rows if which == "w3.weight" else 0)
    tried = ", ".join(other_names(parameter.name))
    problems.add("missing tensors", f"{parameter.name} (also looked for {tried})")
    return None


def _fits(
    entry: TensorEntry, shape: tuple[int, ...], dtypes: tuple[str, ...], problems: _Problems, scaled: bool = False
) -> bool:
    if entry.dtype not in dtypes:
        expected = " or ".join(dtypes) + (" or F8_E4M3 with a scale" if scaled else "")
        problems.add("tensors of a wrong type", f"{entry.name} is {entry.dtype}, expected {expected}")
        return False
    if entry.shape != shape:
        problems.add("tensors of a wrong shape", f"{entry.name} is {list(entry.shape)}, expected {list(shape)}")
        return False
    return True
