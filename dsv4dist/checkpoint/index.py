"""Which tensors a checkpoint directory holds: names, dtypes, shapes and files, read from safetensors headers only."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from dsv4dist.errors import CheckpointError, one_error

INDEX_FILE = "model.safetensors.index.json"

_ITEM_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ", "F8_E8M0"), 1),
}
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_MAX_HEADER_BYTES = 100 << 20


@dataclass(frozen=True)
class TensorEntry:
    """One stored tensor. `dtype` is safetensors' word (F32, BF16, F8_E4M3, F8_E8M0, I8, ...)."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True)
class CheckpointIndex:
    """All tensors of a checkpoint directory by their stored names."""

    directory: Path
    files: list[Path]
    tensors: dict[str, TensorEntry]

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.tensors.values())


def open_index(directory: Path) -> CheckpointIndex:
    """Read the headers of every safetensors file that `directory` or its index file names.

    Raises: CheckpointError, with all problems at once: no safetensors (pickled weights are never opened), a file that
    the index names and that is missing, a truncated or corrupt file, one tensor in two files.
    """
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such directory")
    weight_map = _weight_map(directory)
    files = [directory / file for file in sorted(set(weight_map.values()))] or _all_files(directory)
    problems: list[str] = []
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        problems.append(f"{INDEX_FILE} names {list_names(missing)}, missing in the directory; complete the download")
    tensors: dict[str, TensorEntry] = {}
    for file in files:
        if not file.is_file():
            continue
        try:
            entries = read_header(file)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        for entry in entries:
            if entry.name in tensors:
                problems.append(f"tensor {entry.name} is both in {tensors[entry.name].file.name} and in {file.name}")
            tensors[entry.name] = entry
    if not problems:
        lost = [f"{name} (in {file})" for name, file in weight_map.items() if name not in tensors]
        if lost:
            problems.append(f"{INDEX_FILE} names tensors that their files do not hold: {list_names(lost)}")
    if problems:
        raise one_error(CheckpointError, str(directory), problems)
    return CheckpointIndex(directory, files, tensors)


def read_header(file: Path) -> list[TensorEntry]:
    """The tensors that a safetensors file declares, after checking that all their bytes are there.

    Raises: CheckpointError naming the file.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(8)
            if start[:7] == b"version":
                raise CheckpointError(
                    f"{file.name} is a Git LFS pointer, not the weights; fetch them with git lfs pull"
                )
            header_bytes = int.from_bytes(start, "little")
            if size < 8 or header_bytes > size - 8:
                raise CheckpointError(f"{file.name} is truncated or corrupt: {size} bytes do not hold its header")
            if header_bytes > _MAX_HEADER_BYTES:
                raise CheckpointError(f"{file.name} is corrupt: its header claims {header_bytes} bytes")
            header = json.loads(stream.read(header_bytes))
    except OSError as error:
        raise CheckpointError(f"{file.name} cannot be read ({error.strerror})") from None
    except ValueError:
        raise CheckpointError(f"{file.name} is corrupt: its header is not JSON") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{file.name} is corrupt: its header is not an object")
    header.pop("__metadata__", None)
    entries, end = [], 0
    for name, description in header.items():
        entry, stop = _entry(file, name, description)
        entries.append(entry)
        end = max(end, stop)
    if size != 8 + header_bytes + end:
        verdict = "truncated" if size < 8 + header_bytes + end else "corrupt"
        raise CheckpointError(
            f"{file.name} is {verdict}: it has {size} bytes, its header describes {8 + header_bytes + end}"
        )
    return entries


def _entry(file: Path, name: str, description: object) -> tuple[TensorEntry, int]:
    try:
        dtype, shape, (start, stop) = (description[key] for key in ("dtype", "shape", "data_offsets"))  # type: ignore[index]
        numbers_good = all(type(number) is int and number >= 0 for number in (*shape, start, stop))
    except (TypeError, KeyError, ValueError):
        numbers_good = False
    if not numbers_good or stop < start:
        raise CheckpointError(f"{file.name} is corrupt: its header describes {name} wrongly")
    if dtype in _ITEM_BYTES and math.prod(shape) * _ITEM_BYTES[dtype] != stop - start:
        raise CheckpointError(f"{file.name} is corrupt: {name} is {dtype} {shape} in {stop - start} bytes")
    return TensorEntry(name, file, str(dtype), tuple(shape), stop - start), stop


def _weight_map(directory: Path) -> dict[str, str]:
    path = directory / INDEX_FILE
    if not path.is_file():
        return {}
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError):
        raise CheckpointError(f"{path}: not readable, or without a weight_map; fetch it again") from None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{path}: weight_map must map tensor names to file names")
    names = set(weight_map.values())
    odd = sorted(file for file in names if Path(file).name != file or not file.endswith(".safetensors"))
    if odd:
        raise CheckpointError(f"{path}: {list_names(odd)}: only safetensors files next to the index are read")
    return weight_map


def _all_files(directory: Path) -> list[Path]:
    files = sorted(directory.glob("*.safetensors"))
    if files:
        return files
    pickles = sorted(file.name for file in directory.iterdir() if file.suffix in _PICKLES)
    if pickles:
        raise CheckpointError(
            f"{directory}: holds {list_names(pickles)} but no safetensors; pickled weights can run code and are not "
            "opened, convert them to safetensors"
        )
    raise CheckpointError(f"{directory}: there is no *.safetensors file in it")


def list_names(names: list[str], limit: int = 10) -> str:
    """The first `limit` names, and how many more there are, for one line of an error."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
