"""Copies of a checkpoint with some tensors changed, renamed or removed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


def read_all(directory: Path) -> Tensors:
    """Every stored tensor of a directory, by its stored name."""
    tensors: Tensors = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def rewrite(source: Path, target: Path, change: Callable[[Tensors], Tensors | None]) -> Path:
    """Write `source` to `target` as one file after `change`, which edits the dict or returns a new one."""
    tensors = read_all(source)
    tensors = change(tensors) or tensors
    target.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    shutil.copyfile(source / "config.json", target / "config.json")
    return target
