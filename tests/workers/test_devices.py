"""From visible-device variables to a rank's own GPU: the same answer whoever set which of them."""

from __future__ import annotations

import os

import pytest

from dsv4dist.env import DEVICE_MASKS, device_masks, fold_rocr_mask
from dsv4dist.errors import UnsupportedError
from dsv4dist.workers.devices import device_index

FOUR = "4,5,6,7"


@pytest.fixture(autouse=True)
def _no_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in DEVICE_MASKS:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", DEVICE_MASKS)
def test_any_vendors_variable_gives_the_same_devices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, FOUR)
    assert [device_index(gpu_id, device_masks(), 4) for gpu_id in FOUR.split(",")] == [0, 1, 2, 3]


def test_without_a_variable_the_number_counts_and_one_visible_device_is_it() -> None:
    assert [device_index(str(gpu_id), device_masks(), 4) for gpu_id in range(4)] == [0, 1, 2, 3]
    assert device_index("7", {"HIP_VISIBLE_DEVICES": "7"}, 1) == 0
    assert device_index("GPU-abc", {}, 1) == 0


def test_names_and_spaces() -> None:
    masks = {"CUDA_VISIBLE_DEVICES": "GPU-a, GPU-b", "HIP_VISIBLE_DEVICES": "GPU-a,GPU-b"}
    assert device_index("GPU-b", masks, 2) == 1


@pytest.mark.parametrize(
    ("gpu_id", "masks", "visible"),
    [
        ("5", {"HIP_VISIBLE_DEVICES": FOUR, "CUDA_VISIBLE_DEVICES": "5,4,6,7"}, 4),
        ("9", {"HIP_VISIBLE_DEVICES": FOUR}, 4),
        ("7", {"HIP_VISIBLE_DEVICES": FOUR}, 2),
        ("4", {}, 4),
        ("GPU-a", {}, 2),
    ],
)
def test_contradictions_are_refused_with_every_value(gpu_id: str, masks: dict[str, str], visible: int) -> None:
    with pytest.raises(UnsupportedError) as refused:
        device_index(gpu_id, masks, visible)
    shown = [f"{name}={value}" for name, value in masks.items()] or ["no visible-device variable"]
    assert all(part in str(refused.value) for part in (repr(gpu_id), f"sees {visible}", *shown))


@pytest.mark.parametrize(
    ("rocr", "hip", "left"),
    [
        (FOUR, None, FOUR),
        (FOUR, "1, 3", "5,7"),
        ("GPU-a,GPU-b", "1", "GPU-b"),
        (FOUR, "GPU-x,9", "GPU-x,9"),
        ("", None, ""),
    ],
)
def test_rocr_becomes_hip_since_ray_refuses_it(
    rocr: str, hip: str | None, left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", rocr)
    if hip is not None:
        monkeypatch.setenv("HIP_VISIBLE_DEVICES", hip)
    said = fold_rocr_mask()
    assert said is not None
    assert f"ROCR_VISIBLE_DEVICES={rocr} replaced" in said
    assert hip is None or hip in said
    assert device_masks() == {"HIP_VISIBLE_DEVICES": left}
    assert fold_rocr_mask() is None
    del os.environ["HIP_VISIBLE_DEVICES"]
