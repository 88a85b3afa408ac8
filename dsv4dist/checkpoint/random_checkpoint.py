"""Random checkpoints in which every parameter matters, in either format, plain or quantised like the releases."""

from __future__ import annotations

import json
import math
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dsv4dist.checkpoint.index import INDEX_FILE, CheckpointIndex, open_index
from dsv4dist.checkpoint.names import SCALE_SUFFIXES, save_pretrained_name
from dsv4dist.checkpoint.parameters import Parameter, Role, Storage, draft_parameters, model_parameters
from dsv4dist.checkpoint.presets import PRESETS, release_config, transformers_config
from dsv4dist.checkpoint.tiny_tokenizer import TOKENIZER_FILES, write_tokenizer
from dsv4dist.config.model import ModelConfig, parse_model_config
from dsv4dist.errors import CheckpointError, ConfigError, one_error
from dsv4dist.kernels.fp8 import (
    FP4_BLOCK,
    WEIGHT_BLOCK,
    dequantise_block_fp8,
    dequantise_fp4,
    quantise_block_fp8,
    quantise_fp4,
)

FORMATS = ("release", "transformers")
MARKER_FILE = "random_checkpoint.json"
"""Says that a directory was written here, and which files of it: those alone are ever replaced."""
_PARTIAL = ".partial"  # ends the name of a shard until all of them are written

# Mean and standard deviation by ending of the name; what is not here is a matrix with unit gain.
_SPREADS = {
    "embed.weight": (0.0, 1.0),
    "attn_sink": (0.5, 1.5),
    "ape": (0.0, 0.7),
    "gate.bias": (0.0, 0.2),
    "_base": (0.0, 0.5),
}


def make_checkpoint(
    directory: str | Path,
    preset: str = "tiny",
    seed: int = 0,
    format: str = "release",
    quant: bool = False,
    overrides: dict[str, Any] | None = None,
    max_shard_bytes: int = 2_000_000_000,
) -> Path:
    """Write a random checkpoint (config.json, weights, tokenizer) whose every parameter is non-trivial.

    Values depend on the seed and the parameter's name only: both formats hold the same model. `quant` stores the
    release format's fp8 and fp4 matrices with e8m0 scales. `overrides` replaces sizes of the preset, by release names.
    Several shards and an index file are written when one would exceed `max_shard_bytes`. A directory that was written
    here before is replaced; any other that is not empty is refused.
    Raises: ConfigError for bad arguments, CheckpointError for a directory that must not be written to.
    """
    target = Path(directory)
    sizes = _sizes(preset, seed, format, quant, overrides or {})
    raw = release_config(sizes, quant) if format == "release" else transformers_config(sizes)
    config = parse_model_config(raw, where=f"preset {preset}")
    _check_sizes(config, quant)
    made_from = {"preset": preset, "seed": seed, "format": format, "quant": quant, "overrides": overrides or {}}
    with _write_errors(target):
        writer = _Writer(target, made_from, max_shard_bytes)
        for name, tensor in _stored_tensors(config, seed, format, quant):
            writer.add(name, tensor)
        writer.finish(raw)
        writer.record(TOKENIZER_FILES)
        write_tokenizer(target, config)
    return target


def dequantise_checkpoint(source: str | Path, target: str | Path) -> Path:
    """Write the checkpoint in `source` with every weight as the fp32 numbers it stands for, under the same names.

    Raises: CheckpointError for an unreadable source or a target that must not be written to.
    """
    source, target = Path(source), Path(target)
    index = open_index(source)
    if target.resolve() == source.resolve():
        raise CheckpointError(f"{target}: a checkpoint cannot be dequantised into its own directory")
    raw = json.loads((source / "config.json").read_text(encoding="utf-8"))
    for key in ("quantization_config", "expert_dtype"):
        raw.pop(key, None)
    raw["torch_dtype"] = "float32"
    with _write_errors(target):
        writer = _Writer(target, {"dequantised": True}, max_shard_bytes=2_000_000_000)
        for name, tensor in _dequantised_tensors(index):
            writer.add(name, tensor)
        writer.finish(raw)
        copied = [file for file in TOKENIZER_FILES if (source / file).is_file()]
        writer.record(copied)
        for file in copied:
            shutil.copyfile(source / file, target / file)
    return target


def random_parameter(parameter: Parameter, config: ModelConfig, seed: int) -> Tensor:
    """The value of one parameter of a random checkpoint: fp32 (int64 for an index table), full shape.

    Scaled so that activations stay near 1 and logits have a standard deviation near 2.
    """
    # The generator uses 32 bits of its seed.
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {parameter.name}".encode()))
    name, shape = parameter.name, parameter.shape
    if parameter.role is Role.INDEX:  # distinct experts for every token id
        return torch.rand(shape[0], config.n_routed_experts, generator=generator).argsort(dim=1)[:, : shape[1]]
    values = torch.randn(shape, generator=generator)
    if name.endswith(("_scale", "norm.weight")):
        return 1.0 + 0.2 * values.clamp(-3, 3)
    for ending, (mean, spread) in _SPREADS.items():
        if name.endswith(ending):
            return mean + spread * values
    spread = 2.0 if name == "head.weight" else 1.0
    return values * _block_factors(parameter, generator) * (spread / math.sqrt(shape[1]))


def _block_factors(parameter: Parameter, generator: torch.Generator) -> Tensor:
    """Per scale block 0.5, 1 or 2 (rms 1), so that a quantised matrix has different scales and none can be mixed up."""
    blocks = {Storage.FP8: (WEIGHT_BLOCK, WEIGHT_BLOCK), Storage.FP4: (1, FP4_BLOCK)}.get(parameter.storage)
    if blocks is None:
        return torch.ones(1, 1)
    count = [-(-size // block) for size, block in zip(parameter.shape, blocks, strict=True)]
    factors = torch.exp2(torch.randint(-1, 2, count, generator=generator).float()) / math.sqrt(1.75)
    for dim, block in enumerate(blocks):
        factors = factors.repeat_interleave(block, dim=dim)
    return factors[: parameter.shape[0], : parameter.shape[1]]


def _stored_tensors(config: ModelConfig, seed: int, format: str, quant: bool) -> Iterator[tuple[str, Tensor]]:
    release = format == "release"
    parameters = [*model_parameters(config), *(draft_parameters(config) if release else ())]
    for parameter in parameters:
        value = random_parameter(parameter, config, seed)
        name = parameter.name if release else save_pretrained_name(parameter.name)
        if quant and parameter.storage in (Storage.FP8, Storage.FP4):
            data, scale = (quantise_block_fp8 if parameter.storage is Storage.FP8 else quantise_fp4)(value)
            yield name, data
            yield name.removesuffix("weight") + "scale", scale
        elif parameter.storage in (Storage.FP32, Storage.INT64):
            yield name, value
        else:
            rounded = value.to(torch.bfloat16)
            # transformers keeps norms in fp32, here with the value that the release format has.
            yield name, rounded.float() if value.ndim == 1 and not release else rounded


def _dequantised_tensors(index: CheckpointIndex) -> Iterator[tuple[str, Tensor]]:
    scales = {}
    for name in index.tensors:
        stem = name.removesuffix("weight")
        found = [stem + suffix for suffix in SCALE_SUFFIXES if name != stem and stem + suffix in index.tensors]
        if found:
            scales[name] = found[0]
    for name, entry in index.tensors.items():
        if name in scales.values():
            continue
        tensor = _read(entry.file, name)
        if name in scales and tensor.element_size() == 1:
            scale = _read(index.tensors[scales[name]].file, scales[name])
            packed = tensor.dtype in (torch.int8, torch.uint8)
            tensor = (dequantise_fp4 if packed else dequantise_block_fp8)(tensor, scale)
        yield name, tensor.float() if tensor.is_floating_point() else tensor


def _sizes(preset: str, seed: int, format: str, quant: bool, overrides: dict[str, Any]) -> dict[str, Any]:
    problems = []
    if preset not in PRESETS:
        problems.append(f"preset is {preset!r}; choose from {', '.join(PRESETS)}")
    if format not in FORMATS:
        problems.append(f"format is {format!r}; choose from {', '.join(FORMATS)}")
    if not 0 <= seed < 1 << 31:
        problems.append(f"seed is {seed}; expected 0 to 2^31 - 1")
    if quant and format == "transformers":
        problems.append("quant needs format 'release': transformers saves no fp4 experts")
    known = PRESETS["tiny"]
    unknown = sorted(overrides.keys() - known)
    if unknown:
        problems.append(f"override {', '.join(unknown)} is no size of a preset; known: {', '.join(known)}")
    if problems:
        raise one_error(ConfigError, "random checkpoint", problems)
    return PRESETS[preset] | overrides


def _check_sizes(config: ModelConfig, quant: bool) -> None:
    sizes = {"hidden_size": config.hidden_size, "moe_intermediate_size": config.moe_intermediate_size}
    bad = [f"{name} = {size}" for name, size in sizes.items() if size % FP4_BLOCK]
    if quant and bad:
        raise ConfigError(f"random checkpoint: fp4 experts need multiples of {FP4_BLOCK}, not {', '.join(bad)}")


@contextmanager
def _write_errors(directory: Path) -> Iterator[None]:
    """Turn what the file system refuses into one named error."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise CheckpointError(f"{directory}: cannot be written to ({reason})") from None


def _read(file: Path, name: str) -> Tensor:
    with safe_open(file, framework="pt") as handle:
        tensor: Tensor = handle.get_tensor(name)
        return tensor.clone()


class _Writer:
    """Writes tensors into shards of bounded size; a shard appears under its final name only when all are written."""

    def __init__(self, directory: Path, made_from: dict[str, Any], max_shard_bytes: int) -> None:
        self.directory = directory
        self._made_from = made_from
        self._files: list[str] = []
        self._max_shard_bytes = max_shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[list[str]] = []
        self._total_bytes = 0
        self._claim()

    def _claim(self) -> None:
        """Take an empty or new directory, or clear one that was written here; refuse every other."""
        self.directory.mkdir(parents=True, exist_ok=True)
        present = {entry.name for entry in self.directory.iterdir()}
        marker = self.directory / MARKER_FILE
        ours = set()
        if marker.is_file():
            ours = {*_marked_files(marker), *(name for name in present if name.endswith(_PARTIAL))}
        foreign = sorted(present - ours)
        if foreign:
            raise CheckpointError(
                f"{self.directory}: holds {', '.join(foreign[:5])}, not written by make-checkpoint; nothing was "
                "changed, choose an empty or a new directory"
            )
        for name in present - {MARKER_FILE}:
            (self.directory / name).unlink()
        self.record([MARKER_FILE])

    def record(self, files: list[str]) -> None:
        """Note files as written here, in the marker."""
        self._files += files
        text = json.dumps(self._made_from | {"files": self._files}, indent=1)
        (self.directory / MARKER_FILE).write_text(text + "\n", encoding="utf-8")

    def add(self, name: str, tensor: Tensor) -> None:
        num_bytes = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + num_bytes > self._max_shard_bytes:
            self._flush()
        self._pending[name] = tensor.contiguous()
        self._pending_bytes += num_bytes
        self._total_bytes += num_bytes

    def _flush(self) -> None:
        path = self.directory / f"{len(self._shards):05d}{_PARTIAL}"
        save_file(self._pending, path, metadata={"format": "pt"})
        self._shards.append(list(self._pending))
        self._pending, self._pending_bytes = {}, 0

    def finish(self, config: dict[str, Any]) -> None:
        """Write the last shard, give all their names, then write the index (of several shards) and config.json."""
        self._flush()
        count = len(self._shards)
        names = [f"model-{shard + 1:05d}-of-{count:05d}.safetensors" for shard in range(count)]
        names = names if count > 1 else ["model.safetensors"]
        documents = {"config.json": config}
        if count > 1:
            weight_map = {tensor: file for file, tensors in zip(names, self._shards, strict=True) for tensor in tensors}
            documents[INDEX_FILE] = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
        self.record([*names, *documents])
        for shard, name in enumerate(names):
            (self.directory / f"{shard:05d}{_PARTIAL}").rename(self.directory / name)
        for name, content in documents.items():
            (self.directory / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _marked_files(marker: Path) -> list[str]:
    try:
        files = json.loads(marker.read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError, TypeError):
        raise CheckpointError(f"{marker}: not readable; remove the directory yourself if it may go") from None
    return [file for file in files if isinstance(file, str) and Path(file).name == file]


__all__ = ["FORMATS", "PRESETS", "dequantise_checkpoint", "make_checkpoint", "random_parameter"]
