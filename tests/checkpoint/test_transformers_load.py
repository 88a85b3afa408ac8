"""transformers reads what is written here, and what transformers writes is read here, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dsv4dist.checkpoint.load import load_parameters
from dsv4dist.checkpoint.random_checkpoint import dequantise_checkpoint
from dsv4dist.config.model import load_model_config
from dsv4dist.distributed.tp import TpInfo
from tests.checkpoint.rewrite import Tensors, read_all

transformers = pytest.importorskip("transformers")
Checkpoint = Callable[..., Path]


def load(directory: Path) -> Tensors:
    config = load_model_config(directory)
    return load_parameters(directory, config, TpInfo(), torch.float32, torch.device("cpu")).tensors


def assert_same(got: Tensors, expected: Tensors) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name


def read_by_transformers(directory: Path) -> Any:
    model, info = transformers.DeepseekV4ForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[kind], kind
    return model


@pytest.mark.parametrize("form", ["release", "transformers", "dequantised"])
def test_read_and_saved_by_transformers(checkpoint: Checkpoint, tmp_path: Path, form: str) -> None:
    if form == "dequantised":
        directory = dequantise_checkpoint(checkpoint("tiny", quant=True), tmp_path / "plain")
    else:
        directory = checkpoint("tiny", format=form)
    ours = load(directory)
    model = read_by_transformers(directory)

    # The module names inside transformers, fused experts included, are a third spelling that is read.
    modules = tmp_path / "modules"
    modules.mkdir()
    state = {name: value.contiguous() for name, value in model.state_dict().items() if "inv_freq" not in name}
    save_file(state, modules / "model.safetensors")
    model.save_pretrained(tmp_path / "saved")
    (modules / "config.json").write_text((tmp_path / "saved" / "config.json").read_text())

    assert load_model_config(tmp_path / "saved") == load_model_config(directory)
    assert_same(load(tmp_path / "saved"), ours)
    assert_same(load(modules), ours)
    if form == "transformers":
        assert read_all(tmp_path / "saved").keys() == read_all(directory).keys()


def test_activations_are_healthy(checkpoint: Checkpoint) -> None:
    model = read_by_transformers(checkpoint("tiny"))
    tokens = torch.randint(0, 512, (1, 300), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        output = model(tokens, output_hidden_states=True)
    assert 1 < output.logits.std() < 3
    assert len(set(output.logits[0].argmax(-1).tolist())) > 100
    for hidden in output.hidden_states:
        assert 0.5 < hidden.float().std() < 5
