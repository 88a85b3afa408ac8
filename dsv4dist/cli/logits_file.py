"""A safetensors file written tensor by tensor, for logits that together are larger than memory."""

from __future__ import annotations

import json
import os
from io import FileIO
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from dsv4dist.cli.output import append

_ENTRY_BYTES = 120
"""At least what one tensor's header entry takes beside its name: dtype, two sizes and two offsets."""


class LogitsFile:
    """Float32 matrices by name. Holds what was added when the block ends, also when it ends by an exception.

    The format's header stands in front and needs every size. So its room is reserved from the names, the only thing
    known beforehand, and filled in at the end; the format allows spaces behind it."""

    def __init__(self, path: Path, names: list[str]) -> None:
        self._path = path
        self._part = path.with_name(f"{path.name}.{os.getpid()}.part")
        room = 2 + sum(len(json.dumps(name)) + _ENTRY_BYTES for name in names)
        self._header_bytes = (room + 7) // 8 * 8
        self._entries: dict[str, dict[str, object]] = {}
        self._data_bytes = 0

    def __enter__(self) -> LogitsFile:
        self._file = FileIO(self._part, "x")
        append(self._file, bytes(8 + self._header_bytes))  # no hole: a disk that fills up must still take the header
        return self

    def add(self, name: str, logits: npt.NDArray[np.float32]) -> None:
        """Append one matrix [tokens, vocab].  Raises: OSError naming the file; what was added before stays."""
        data = np.ascontiguousarray(logits, dtype="<f4")
        append(self._file, data.data.cast("B"))
        end = self._data_bytes + data.nbytes
        self._entries[name] = {"dtype": "F32", "shape": list(data.shape), "data_offsets": [self._data_bytes, end]}
        self._data_bytes = end

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        header = json.dumps(self._entries).encode().ljust(self._header_bytes)
        assert len(header) == self._header_bytes, "a tensor was added whose name was not announced"
        self._file.seek(0)
        self._file.write(self._header_bytes.to_bytes(8, "little") + header)
        self._file.close()
        if self._entries:
            os.replace(self._part, self._path)
        else:
            self._part.unlink()
