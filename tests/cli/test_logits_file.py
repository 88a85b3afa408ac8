"""Oracle: the safetensors library reads what is written."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file

from dsv4dist.cli.logits_file import LogitsFile


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "logits.safetensors"
    random = np.random.default_rng(0)
    names = ["0", 'quote " and \\', "雪", "x" * 500, "never added"]
    matrices = {name: random.standard_normal((rows, 7), np.float32) for rows, name in enumerate(names[:4], start=1)}
    matrices["0"] = np.asfortranarray(matrices["0"])
    with LogitsFile(path, names) as file:
        for name, matrix in matrices.items():
            file.add(name, matrix)
    found = load_file(path)
    assert set(found) == set(matrices)
    for name, matrix in matrices.items():
        assert found[name].dtype == np.float32
        np.testing.assert_array_equal(found[name], matrix)
    assert list(tmp_path.iterdir()) == [path]


def test_files_with_similar_names_are_left_alone(tmp_path: Path) -> None:
    neighbour = tmp_path / "logits.safetensors.part"
    neighbour.write_text("kept")
    with LogitsFile(tmp_path / "logits.safetensors", ["a"]) as file:
        file.add("a", np.ones((2, 3), np.float32))
    assert neighbour.read_text() == "kept"
    assert sorted(tmp_path.iterdir()) == [tmp_path / "logits.safetensors", neighbour]


def test_what_was_added_before_a_failure_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "logits.safetensors"
    with suppress(KeyboardInterrupt), LogitsFile(path, ["a", "b"]) as file:
        file.add("a", np.ones((2, 3), np.float32))
        raise KeyboardInterrupt
    with safe_open(path, "np") as found:
        assert list(found.keys()) == ["a"]


def test_nothing_added_leaves_no_file(tmp_path: Path) -> None:
    with LogitsFile(tmp_path / "logits.safetensors", ["a"]):
        pass
    assert list(tmp_path.iterdir()) == []
