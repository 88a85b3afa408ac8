"""The memory plan against hand arithmetic and the allocator itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dsv4dist.cache.groups import cache_groups, plan_num_blocks
from dsv4dist.cache.memory_plan import MemoryOptions, plan_memory, rotary_bytes, weight_bytes
from dsv4dist.cache.pool import allocate_caches
from dsv4dist.checkpoint.load import load_parameters
from dsv4dist.cli.app import run
from dsv4dist.config.model import load_model_config, parse_model_config
from dsv4dist.config.presets import preset_config
from dsv4dist.distributed.tp import TpInfo
from dsv4dist.errors import ConfigError
from dsv4dist.kernels.paged_cache import Fp8Format
from dsv4dist.step.buffers import StepBuffers, bucket_sizes, decode_widths, step_buffer_bytes
from tests.config.test_model import FLASH

OPTIONS = MemoryOptions("mi300x", "bfloat16", "fp8_ds_mla", 131072, 64, 2048, 0.9)


def test_presets_are_the_releases() -> None:
    assert preset_config("flash") == parse_model_config(FLASH | {"bos_token_id": 0})
    pro = preset_config("pro")
    assert (pro.num_hidden_layers, pro.num_attention_heads, pro.index_topk) == (61, 128, 1024)


def test_weights_of_a_rank_by_hand() -> None:
    """Flash at TP 8, experts alone: 43 layers x 256 experts x 3 matrices of 4096 x 2048 / 8 in bfloat16."""
    experts = 43 * 256 * 3 * 4096 * 2048 // 8 * 2
    rest = weight_bytes(preset_config("flash"), 8, "bfloat16") - experts
    assert 0 < rest < experts / 5
    assert rotary_bytes(preset_config("flash"), 1000) == 2 * 1015 * 64 * 4


def test_weights_and_tables_are_those_that_a_rank_holds(checkpoint: Callable[..., Path]) -> None:
    directory = checkpoint("tiny")
    config = load_model_config(directory)
    for size in (1, 2):
        loaded = load_parameters(directory, config, TpInfo(0, size), torch.bfloat16, torch.device("cpu"))
        held = sum(tensor.numel() * tensor.element_size() for tensor in loaded.tensors.values())
        assert held == weight_bytes(config, size, "bfloat16")
    buckets = bucket_sizes(8)
    widths = decode_widths(cache_groups(config, "float32"), 1024, 1)
    buffers = StepBuffers(buckets, 8, widths, torch.device("cpu"), poison=False)
    assert buffers.num_bytes == step_buffer_bytes(buckets, 8, widths)


def test_cache_rows_by_hand() -> None:
    rows = {(row["item"], row["per"]): row for row in plan_memory(preset_config("flash"), 8, OPTIONS)}
    block = 21 * (37440 + 8640) + 20 * 1728
    assert rows["compressed cache", "token"]["bytes"] == pytest.approx(block / 256)
    assert rows["compressed cache", "request of 131072 tokens"]["bytes"] == 512 * block
    assert rows["requests that fit", "context of 131072 tokens"]["count"] == 64


def test_blocks_are_those_that_the_allocator_makes() -> None:
    """The bytes of a plan's blocks are the bytes of the tensors allocated for them."""
    config = parse_model_config(FLASH | {"num_hidden_layers": 3, "compress_ratios": [0, 4, 128], "num_hash_layers": 0})
    for dtype in ("fp8_ds_mla", "bfloat16", "float32"):
        groups = cache_groups(config, dtype)
        plan = plan_num_blocks(groups, 1 << 28, 2, 64, 1024, retain=True)
        caches = allocate_caches(config, plan, dtype, Fp8Format.OCP, torch.device("cpu"), poison=False)
        tensors = [
            cache.data
            for layer in caches
            for cache in (layer.window, layer.entries, layer.state, layer.index_keys, layer.index_state)
            if cache is not None
        ]
        allocated = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        assert allocated == sum(plan[group.name] * group.block_bytes for group in groups)


def test_what_does_not_fit_is_zero_requests_and_a_bad_split_is_refused() -> None:
    options = MemoryOptions("h100", "bfloat16", "fp8_ds_mla", 8192, 8, 2048, 0.9)
    rows = plan_memory(preset_config("pro"), 1, options)
    assert rows[-1]["count"] == 0
    assert all(row.get("count", 0) >= 0 for row in rows)
    with pytest.raises(ConfigError, match="use one of 1, 2, 4, 8"):
        plan_memory(preset_config("flash"), 3, options)


def test_the_command_refuses_what_a_run_refuses(
    checkpoint: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", "--model", "flash", "--context", "9999999"]) == 2
    assert "--context is 9999999; the model's max_position_embeddings is 1048576" in capsys.readouterr().err
    assert run(["plan", "--model", str(checkpoint("tiny"))]) == 2
    assert "--kv-cache-dtype fp8_ds_mla needs head_dim = 512" in capsys.readouterr().err


def test_the_command_says_when_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--model", "pro", "--gpu", "h100"]) == 0
    assert "not one request fits" in capsys.readouterr().err


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--model", "flash", "--tp", "8", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert rows[0]["item"] == "weights"
    assert run(["plan", "--model", "flash", "--tp", "3"]) == 2
    assert run(["plan", "--model", "flash", "--gpu", "tpu"]) == 2
    assert run(["plan", "--model", "/nowhere"]) == 1
    assert "no such directory" in capsys.readouterr().err
