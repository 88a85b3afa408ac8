"""The graph-stable copy of a decode step: one buffer, a few padded sizes, the same addresses every time."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from dsv4dist.cache.groups import GROUP_NAMES, CacheGroup
from dsv4dist.step.sections import PacketShape, split_sections

POISON_WORD = 0x7F7F7F7F
PADDING = {"targets": -1} | {f"{name}.blocks": -1 for name in GROUP_NAMES}
"""What fills a section behind the real requests and tokens where it is not 0; nothing there is written or seen."""


def bucket_sizes(max_tokens: int) -> list[int]:
    """Padded token counts of decode steps: 1, 2, 4, 8, then multiples of 8, to the first that holds max_tokens."""
    small = [size for size in (1, 2, 4) if size < max_tokens]
    return [*small, *range(8, -(-max_tokens // 8) * 8 + 1, 8)] if max_tokens > 4 else [*small, max_tokens]


def decode_widths(groups: tuple[CacheGroup, ...], max_model_len: int, tokens_per_request: int) -> tuple[int, ...]:
    """Block table columns that a decode row can need in each of GROUP_NAMES; 0 for groups the model has not got."""
    widths = dict.fromkeys(GROUP_NAMES, 0)
    for group in groups:
        reach = max_model_len if group.window is None else group.window - 1
        widths[group.name] = -(-(reach + tokens_per_request) // group.block_tokens) + 1
    return tuple(widths.values())


def bucket_shapes(buckets: list[int], max_num_seqs: int, widths: tuple[int, ...]) -> dict[int, PacketShape]:
    """The fixed layout of every bucket."""
    return {size: PacketShape(min(size, max_num_seqs), size, widths) for size in buckets}


def step_buffer_bytes(buckets: list[int], max_num_seqs: int, widths: tuple[int, ...]) -> int:
    """Bytes of the step buffer on the device."""
    return 4 * max(shape.num_words for shape in bucket_shapes(buckets, max_num_seqs, widths).values())


class StepBuffers:
    """Holds one decode step on the device, padded to a bucket.

    Every bucket has a fixed layout, so that a captured graph finds each section where it was at capture. A step is
    written as a whole: what a smaller step does not fill is absent, never left over from the step before.
    """

    def __init__(
        self, buckets: list[int], max_num_seqs: int, widths: tuple[int, ...], device: torch.device, poison: bool
    ) -> None:
        self.shapes = bucket_shapes(buckets, max_num_seqs, widths)
        num_words = step_buffer_bytes(buckets, max_num_seqs, widths) // 4
        self._host = torch.empty(num_words, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = torch.empty(num_words, dtype=torch.int32, device=device)
        if poison:
            self._host.fill_(POISON_WORD)
            self._device.fill_(POISON_WORD)
        self._address = self._device.data_ptr()

    @property
    def memory(self) -> torch.Tensor:
        """The whole buffer on the device."""
        return self._device

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return self._device.numel() * self._device.element_size()

    def bucket_of(self, shape: PacketShape) -> int | None:
        """The smallest bucket that holds a step of this shape; None where none does."""
        for size, padded in self.shapes.items():
            widths_fit = all(width <= limit for width, limit in zip(shape.widths, padded.widths, strict=True))
            if shape.num_tokens <= size and shape.num_requests <= padded.num_requests and widths_fit:
                return size
        return None

    def stage(self, real: Mapping[str, npt.NDArray[np.int32]], bucket: int) -> dict[str, torch.Tensor]:
        """Copy the sections of a step to the device, padded to `bucket`; returns its sections there."""
        padded = self.shapes[bucket]
        words = padded.num_words
        host = self._host[:words]
        _pad(real, split_sections(host.numpy(), padded))
        assert self._device.data_ptr() == self._address, (
            "the step buffer moved; captured graphs would read freed memory"
        )
        self._device[:words].copy_(host, non_blocking=True)
        return self.sections(bucket)

    def clear(self, bucket: int) -> dict[str, torch.Tensor]:
        """Stage a step without requests: all its rows are padding, which writes and sees nothing."""
        shape = PacketShape(0, 0, (0,) * len(GROUP_NAMES))
        empty = {name: np.zeros(dims, dtype=np.int32) for name, dims in shape.sections().items()}
        return self.stage(empty, bucket)

    def sections(self, bucket: int) -> dict[str, torch.Tensor]:
        """Views of a bucket's sections on the device; the same memory at every call."""
        views: dict[str, torch.Tensor] = split_sections(self._device, self.shapes[bucket])
        return views


class TokenBuffer:
    """The way of sampled tokens back to the host: one place per step of a packet, so that none waits for the next."""

    def __init__(self, num_steps: int, max_num_seqs: int, words: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._host = torch.empty((num_steps, max_num_seqs, words), dtype=torch.int32, pin_memory=on_gpu)
        self._copied = [torch.cuda.Event() for _ in range(num_steps)] if on_gpu else []

    @property
    def is_asynchronous(self) -> bool:
        """Whether steps may be enqueued before the tokens of earlier ones are there."""
        return bool(self._copied)

    def write(self, ahead: int, tokens: torch.Tensor) -> None:
        """Copy `tokens` int32 [requests, words] of the packet's step `ahead`, behind what the device still does."""
        self._host[ahead, : len(tokens)].copy_(tokens, non_blocking=True)
        if self._copied:
            self._copied[ahead].record()

    def read(self, ahead: int, num_requests: int) -> npt.NDArray[np.int32]:
        """Wait for step `ahead` and return its tokens, memory of the caller's own."""
        if self._copied:
            self._copied[ahead].synchronize()
        return self._host[ahead, :num_requests].numpy().copy()


def _pad(real: Mapping[str, npt.NDArray[np.int32]], padded: Mapping[str, npt.NDArray[np.int32]]) -> None:
    for name, target in padded.items():
        target[...] = real[name][-1] if name == "query_start_loc" else PADDING.get(name, 0)
        source = real[name]
        target[tuple(slice(0, size) for size in source.shape)] = source
