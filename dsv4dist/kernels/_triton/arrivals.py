"""Counters with which the programs of one launch find out who of them ends last, and takes what the others have left.

Every launch finds its counters at zero and leaves them so; the last program to arrive sees to it.
"""

from __future__ import annotations

import torch

MAX_COUNTERS, MAX_STREAMS = 1024, 128  # of one launch; whose launches may be under way at once
_zeros: dict[torch.device, tuple[torch.Tensor, dict[int, int]]] = {}


def arrival_counters(count: int, device: torch.device) -> torch.Tensor:
    """`count` zeros or more, int32, for launches on the current stream, one after the other.

    Launches on different streams may be under way at once and get different ones. Capture: a stream gets the same
    ones each time, from the memory that the device's first call outside of a capture set to zero; more than
    MAX_COUNTERS, more streams than MAX_STREAMS, or a first call in a capture cost a launch that writes new zeros.
    """
    if device.type != "cuda":
        return torch.zeros(count, dtype=torch.int32, device=device)
    if device not in _zeros and not torch.cuda.is_current_stream_capturing():
        _zeros[device] = torch.zeros((MAX_STREAMS, MAX_COUNTERS), dtype=torch.int32, device=device), {}
        torch.cuda.synchronize(device)
    zeros, places = _zeros.get(device, (None, {}))
    place = places.setdefault(torch.cuda.current_stream(device).cuda_stream, len(places))
    if zeros is None or place >= MAX_STREAMS or count > MAX_COUNTERS:
        return torch.zeros(count, dtype=torch.int32, device=device)
    return zeros[place]
