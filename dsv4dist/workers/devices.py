"""Which of the GPUs that a rank's process sees is its own; one answer for CUDA and ROCm. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from dsv4dist.errors import UnsupportedError


def device_index(gpu_id: str, masks: Mapping[str, str], visible: int) -> int:
    """The torch index of the GPU that Ray gave to this process.

    gpu_id   Ray's name of the GPU: a number on its node, or a UUID
    masks    the visible-device variables that are set, see env.device_masks
    visible  how many devices torch sees

    Ray normally masks all but one device, which is then index 0. With its masking switched off the position of
    `gpu_id` in the mask counts, or without any mask its number.  Raises: UnsupportedError showing all three values.
    """
    if visible == 1:
        return 0
    lists = [[entry.strip() for entry in mask.split(",")] for mask in masks.values()]
    positions = {entries.index(gpu_id) for entries in lists if gpu_id in entries}
    if not lists and gpu_id.isdigit():
        positions = {int(gpu_id)}
    if len(positions) == 1 and next(iter(positions)) < visible:
        return positions.pop()
    shown = ", ".join(f"{name}={value}" for name, value in masks.items()) or "no visible-device variable"
    raise UnsupportedError(
        f"Ray gave GPU {gpu_id!r} to a process in which torch sees {visible} with {shown}; "
        "unset these variables, or set only one of them, before Ray starts on that node"
    )
