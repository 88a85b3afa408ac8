"""Which architecture a GPU is, from torch's description of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from dsv4dist.arch import arch_name, arch_of, traits_by_name
from dsv4dist.kernels.paged_cache import Fp8Format


def test_names_of_both_vendors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA build puts the product's name where ROCm builds have the architecture."""
    h200 = SimpleNamespace(gcnArchName="NVIDIA H200", major=9, minor=0)
    monkeypatch.setattr(torch.version, "hip", None)
    assert arch_name(h200) == "sm90"
    monkeypatch.setattr(torch.version, "hip", "7.0")
    mi300x = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-", major=9, minor=4)
    assert arch_name(mi300x) == "gfx942"
    assert traits_by_name("gfx942").fp8_format is Fp8Format.FNUZ


@pytest.mark.gpu
def test_this_gpu_has_a_known_name() -> None:
    device = torch.device("cuda")
    name = arch_name(torch.cuda.get_device_properties(device))
    assert name.startswith(("sm", "gfx"))
    assert arch_of(device).name == name
