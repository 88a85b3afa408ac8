"""Directories that can and cannot be opened: each fault is told in one line that names the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dsv4dist.checkpoint.index import INDEX_FILE, open_index
from dsv4dist.errors import CheckpointError


def save(path: Path, **tensors: torch.Tensor) -> None:
    save_file(tensors, path)


def refused(directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_index(directory)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_one_file_with_every_type(tmp_path: Path) -> None:
    tensors = {
        "a": torch.zeros(2, 3),
        "b": torch.zeros(4, dtype=torch.bfloat16),
        "c": torch.zeros(1, 1, dtype=torch.uint8).view(torch.float8_e8m0fnu),
        "d": torch.zeros(5, 2).to(torch.float8_e4m3fn),
        "e": torch.zeros(2, dtype=torch.int64),
        "f": torch.zeros(0, 7),
    }
    save(tmp_path / "model.safetensors", **tensors)
    index = open_index(tmp_path)
    found = {name: (entry.dtype, entry.shape, entry.num_bytes) for name, entry in index.tensors.items()}
    assert found == {
        "a": ("F32", (2, 3), 24),
        "b": ("BF16", (4,), 8),
        "c": ("F8_E8M0", (1, 1), 1),
        "d": ("F8_E4M3", (5, 2), 10),
        "e": ("I64", (2,), 16),
        "f": ("F32", (0, 7), 0),
    }
    assert index.num_bytes == 59
    assert index.files == [tmp_path / "model.safetensors"]


def test_several_files_without_an_index(tmp_path: Path) -> None:
    save(tmp_path / "a.safetensors", x=torch.zeros(2))
    save(tmp_path / "b.safetensors", y=torch.zeros(2))
    assert set(open_index(tmp_path).tensors) == {"x", "y"}


def test_an_index_chooses_the_files(tmp_path: Path) -> None:
    save(tmp_path / "a.safetensors", x=torch.zeros(2))
    save(tmp_path / "other.safetensors", x=torch.zeros(3))
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"x": "a.safetensors"}}))
    assert open_index(tmp_path).tensors["x"].shape == (2,)


def test_nothing_there(tmp_path: Path) -> None:
    assert "no such directory" in refused(tmp_path / "absent")
    assert "no *.safetensors" in refused(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickles_are_never_opened(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    text = refused(tmp_path)
    assert name in text
    assert "convert them to safetensors" in text


def test_truncated_and_corrupt_files_are_told_together(tmp_path: Path) -> None:
    save(tmp_path / "good.safetensors", x=torch.zeros(64))
    whole = (tmp_path / "good.safetensors").read_bytes()
    header = int.from_bytes(whole[:8], "little")
    faults = {
        "cut_data": whole[:-5],
        "cut_header": whole[: 8 + header // 2],
        "cut_start": whole[:4],
        "empty": b"",
        "too_long": whole + b"abc",
        "no_json": whole[:8] + b"#" * header + whole[8 + header :],
        "huge": (1 << 60).to_bytes(8, "little") + whole[8:],
        "pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n",
        "list": (2).to_bytes(8, "little") + b"[]",
    }
    for name, content in faults.items():
        (tmp_path / f"{name}.safetensors").write_bytes(content)
    text = refused(tmp_path)
    for name in faults:
        assert f"{name}.safetensors is" in text
    assert "good.safetensors" not in text
    assert "git lfs pull" in text


@pytest.mark.parametrize(
    "description",
    [
        5,
        {"dtype": "F32", "shape": [2]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 8, 16]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": ["2"], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]},
    ],
)
def test_wrong_headers(tmp_path: Path, description: object) -> None:
    header = json.dumps({"x": description}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    assert "model.safetensors is corrupt" in refused(tmp_path)


def test_an_index_that_names_missing_files(tmp_path: Path) -> None:
    save(tmp_path / "model-00001-of-00003.safetensors", x=torch.zeros(2))
    files = {"x": 1, "y": 2, "z": 3}
    weight_map = {name: f"model-{number:05d}-of-00003.safetensors" for name, number in files.items()}
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    text = refused(tmp_path)
    assert "model-00002-of-00003.safetensors, model-00003-of-00003.safetensors" in text
    assert "00001-of" not in text


def test_an_index_whose_file_lacks_a_tensor(tmp_path: Path) -> None:
    save(tmp_path / "a.safetensors", x=torch.zeros(2))
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": "a.safetensors"}}))
    assert "y (in a.safetensors)" in refused(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"x": 1}}', "{}"])
def test_unreadable_index(tmp_path: Path, content: str) -> None:
    (tmp_path / INDEX_FILE).write_text(content)
    assert INDEX_FILE in refused(tmp_path)


@pytest.mark.parametrize("file", ["../a.safetensors", "/etc/passwd", "pytorch_model.bin"])
def test_an_index_that_points_elsewhere(tmp_path: Path, file: str) -> None:
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"x": file}}))
    assert "only safetensors files next to the index" in refused(tmp_path)


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    save(tmp_path / "a.safetensors", x=torch.zeros(2))
    save(tmp_path / "b.safetensors", x=torch.zeros(2))
    text = refused(tmp_path)
    assert "x is both in a.safetensors and in b.safetensors" in text
