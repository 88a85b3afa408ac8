"""Loaded shards against the stored bytes, decoded here in numpy, for every group size and every way of storing."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from dsv4dist.checkpoint.load import load_parameters
from dsv4dist.checkpoint.random_checkpoint import dequantise_checkpoint, make_checkpoint
from dsv4dist.config.model import load_model_config
from dsv4dist.distributed.tp import TpInfo
from dsv4dist.errors import CheckpointError, ConfigError
from dsv4dist.kernels.fp8 import decode_fp8
from dsv4dist.kernels.paged_cache import Fp8Format
from tests.checkpoint.rewrite import Tensors, read_all, rewrite

Checkpoint = Callable[..., Path]
CPU = torch.device("cpu")

ROWS = re.compile(r"embed|head\.weight|attn_sink|attn\.wq_b|wo_a|\.w1\.|\.w3\.")
COLUMNS = re.compile(r"wo_b|\.w2\.")
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(w[123]\.weight)")


def load(directory: Path, rank: int = 0, size: int = 1, dtype: torch.dtype = torch.float32) -> Tensors:
    return load_parameters(directory, load_model_config(directory), TpInfo(rank, size), dtype, CPU).tensors


def assert_same(got: Tensors, expected: Tensors) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name


def decoded(tensors: Tensors) -> dict[str, np.ndarray]:
    """All weights as float64 (int64 tables as they are), from their bytes by the definition of the encodings."""
    bytes_ = np.arange(256)
    exponent, mantissa = (bytes_ >> 3) & 15, bytes_ & 7
    e4m3 = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    e4m3 *= np.where(bytes_ & 128, -1.0, 1.0)
    e2m1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    values = {}
    for name, tensor in tensors.items():
        if name.endswith(".scale"):
            continue
        if tensor.element_size() > 1:
            values[name] = tensor.numpy() if tensor.dtype == torch.int64 else tensor.double().numpy()
            continue
        raw = tensor.view(torch.uint8).numpy()
        scale = 2.0 ** (tensors[name.removesuffix("weight") + "scale"].view(torch.uint8).double().numpy() - 127)
        if tensor.dtype == torch.int8:
            values[name] = np.stack([e2m1[raw & 15], e2m1[raw >> 4]], -1).reshape(raw.shape[0], -1)
            values[name] *= np.repeat(scale, 32, axis=1)
        else:
            full = np.repeat(np.repeat(scale, 128, axis=0), 128, axis=1)
            values[name] = e4m3[raw] * full[: raw.shape[0], : raw.shape[1]]
    return values


def share(name: str, value: np.ndarray, rank: int, size: int) -> np.ndarray:
    if COLUMNS.search(name):
        return np.split(value, size, axis=1)[rank]
    if ROWS.search(name) and "indexer" not in name:
        return np.split(value, size, axis=0)[rank]
    return value


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("quant", [False, True], ids=["bf16", "quant"])
def test_every_rank_gets_its_share(checkpoint: Checkpoint, quant: bool, size: int) -> None:
    directory = checkpoint("tiny", quant=quant)
    values = {name: value for name, value in decoded(read_all(directory)).items() if not name.startswith("mtp.")}
    for rank in range(size):
        tensors = load(directory, rank, size)
        seen = set()
        for name, value in values.items():
            expected = share(name, value, rank, size)
            expert = EXPERT.fullmatch(name)
            key = f"{expert[1]}.{expert[3]}" if expert else name
            got = tensors[key][int(expert[2])] if expert else tensors[key]
            np.testing.assert_array_equal(got.numpy(), expected, err_msg=name)
            seen.add(key)
        assert seen == tensors.keys()


def test_types_shapes_and_counts(checkpoint: Checkpoint) -> None:
    directory = checkpoint("tiny", quant=True)
    loaded = load_parameters(directory, load_model_config(directory), TpInfo(1, 2), torch.bfloat16, CPU)
    tensors = loaded.tensors
    assert tensors["layers.1.ffn.experts.w1.weight"].shape == (8, 48, 160)
    assert tensors["layers.1.ffn.experts.w2.weight"].shape == (8, 160, 48)
    assert tensors["layers.1.attn.attn_sink"].shape == (4,)
    for name, tensor in tensors.items():
        exact = ("norm.weight", "attn_sink", "ape", "bias", "ffn.gate.weight", "head.weight")
        if name.endswith("tid2eid"):
            assert tensor.dtype == torch.int64
        elif "hc_" in name or name.endswith(exact):
            assert tensor.dtype == torch.float32, name
        else:
            assert tensor.dtype == torch.bfloat16, name
        assert tensor.is_contiguous()
    total = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    assert loaded.skipped_draft_tensors == 87
    assert total * 0.4 < loaded.bytes_read < total * 0.9


def test_quantised_equals_its_dequantised_self(checkpoint: Checkpoint, tmp_path: Path) -> None:
    directory = checkpoint("tiny", quant=True)
    plain = dequantise_checkpoint(directory, tmp_path / "plain")
    assert load_model_config(plain) == load_model_config(directory)
    for size in (1, 4):
        assert_same(load(directory, size - 1, size), load(plain, size - 1, size))
    # Products of a code and a power of two are exact in bf16 too.
    exact = {name: tensor.float() for name, tensor in load(directory, dtype=torch.bfloat16).items()}
    assert torch.equal(exact["layers.1.attn.wq_b.weight"], load(plain)["layers.1.attn.wq_b.weight"])


def renamed_scales(suffix: str, kind: str, prefix: str) -> Callable[[Tensors], Tensors]:
    def change(tensors: Tensors) -> Tensors:
        out = {}
        for name, tensor in tensors.items():
            if name.endswith(".scale"):
                byte = tensor.view(torch.uint8)
                kinds = {"e8m0": tensor, "uint8": byte, "fp32": torch.ldexp(torch.ones(byte.shape), byte.int() - 127)}
                name, tensor = name.removesuffix("scale") + suffix, kinds[kind]
            elif tensor.dtype == torch.int8 and kind == "uint8":
                tensor = tensor.view(torch.uint8)
            out[prefix + name] = tensor
        out["an.unknown.tensor"] = torch.zeros(2)
        return out

    return change


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize(
    ("suffix", "kind"),
    [("scale", "uint8"), ("weight_scale_inv", "fp32"), ("weight_scale", "e8m0"), ("weight_scale_inv", "uint8")],
)
def test_scale_names_types_and_prefixes(
    checkpoint: Checkpoint, tmp_path: Path, suffix: str, kind: str, prefix: str
) -> None:
    source = checkpoint("tiny-csa", quant=True)
    directory = rewrite(source, tmp_path, renamed_scales(suffix, kind, prefix))
    assert_same(load(directory, 1, 2), load(source, 1, 2))


def test_scales_that_are_no_powers_of_two(checkpoint: Checkpoint, tmp_path: Path) -> None:
    name = "layers.0.attn.wo_b"
    scale = torch.tensor([[3.0, 0.7], [0.01, 1.0]])

    def change(tensors: Tensors) -> None:
        tensors[f"{name}.scale"] = scale

    directory = rewrite(checkpoint("tiny-swa", quant=True), tmp_path, change)
    stored = read_all(directory)[f"{name}.weight"].float()
    full = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:160, :192]
    assert torch.equal(load(directory, 2, 4)[f"{name}.weight"], (stored * full)[:, 96:144])


@pytest.mark.parametrize("kind", ["uint8", "fp32"])
def test_a_nan_scale_is_told_by_name(checkpoint: Checkpoint, tmp_path: Path, kind: str) -> None:
    def change(tensors: Tensors) -> Tensors:
        tensors = renamed_scales("scale", kind, "")(tensors)
        scale = tensors["layers.1.attn.wkv.scale"]
        scale[0, 1] = 255 if kind == "uint8" else float("inf")
        return tensors

    directory = rewrite(checkpoint("tiny-swa", quant=True), tmp_path, change)
    with pytest.raises(CheckpointError, match=r"layers\.1\.attn\.wkv\.scale holds NaN or infinity"):
        load(directory)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_plain_types(checkpoint: Checkpoint, tmp_path: Path, dtype: torch.dtype) -> None:
    def change(tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            if tensor.dtype == torch.bfloat16:
                tensors[name] = tensor.float().mul(1 + 2**-9).to(dtype)

    directory = rewrite(checkpoint("tiny-swa"), tmp_path, change)
    stored = read_all(directory)
    tensors = load(directory)
    for name in ("norm.weight", "layers.0.attn.wq_a.weight", "embed.weight"):
        assert torch.equal(tensors[name], stored[name].float())


def test_sinks_keep_fp32_and_widen_bf16(checkpoint: Checkpoint, tmp_path: Path) -> None:
    sink = torch.tensor([80.0, float("-inf"), *(-3 + 0.1 * head for head in range(6))])

    def change(tensors: Tensors) -> None:
        tensors["layers.0.attn.attn_sink"] = sink
        tensors["layers.1.attn.attn_sink"] = sink.to(torch.bfloat16)

    directory = rewrite(checkpoint("tiny-swa"), tmp_path, change)
    for rank in range(4):
        tensors = load(directory, rank, 4, torch.bfloat16)
        part = slice(rank * 2, rank * 2 + 2)
        assert torch.equal(tensors["layers.0.attn.attn_sink"], sink[part])
        assert torch.equal(tensors["layers.1.attn.attn_sink"], sink.to(torch.bfloat16).float()[part])


@pytest.mark.parametrize("size", [1, 4])
def test_fused_experts(checkpoint: Checkpoint, tmp_path: Path, size: int) -> None:
    source = checkpoint("tiny-swa")

    def change(tensors: Tensors) -> Tensors:
        out = {name: tensor for name, tensor in tensors.items() if not EXPERT.fullmatch(name)}
        for layer in range(2):
            old, new = f"layers.{layer}.ffn.experts", f"model.layers.{layer}.mlp.experts"
            parts = [torch.stack([tensors[f"{old}.{e}.w{n}.weight"] for e in range(8)]) for n in (1, 2, 3)]
            out[f"{new}.gate_up_proj"] = torch.cat((parts[0], parts[2]), dim=1)
            out[f"{new}.down_proj"] = parts[1]
        return out

    directory = rewrite(source, tmp_path, change)
    for rank in range(size):
        assert_same(load(directory, rank, size), load(source, rank, size))


def test_fp8_experts(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Base releases store experts as e4m3 with fp32 block scales."""
    base = "layers.0.ffn.experts.5.w2"
    data = torch.randn(160, 96).to(torch.float8_e4m3fn)
    scale = torch.tensor([[0.25], [4.0]])

    def change(tensors: Tensors) -> None:
        tensors[f"{base}.weight"], tensors[f"{base}.scale"] = data, scale

    directory = rewrite(checkpoint("tiny-swa", quant=True), tmp_path, change)
    expected = (data.float() * scale.repeat_interleave(128, 0)[:160])[:, 48:72]
    assert torch.equal(load(directory, 2, 4)["layers.0.ffn.experts.w2.weight"][5], expected)


@pytest.mark.parametrize("value", [-1, 8])
def test_expert_ids_out_of_range(checkpoint: Checkpoint, tmp_path: Path, value: int) -> None:
    def change(tensors: Tensors) -> None:
        tensors["layers.0.ffn.gate.tid2eid"][17, 1] = value

    directory = rewrite(checkpoint("tiny-swa"), tmp_path, change)
    with pytest.raises(CheckpointError, match=r"tid2eid names experts .*there are 8"):
        load(directory)


def test_expert_ids_may_be_int32(checkpoint: Checkpoint, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors["layers.0.ffn.gate.tid2eid"] = tensors["layers.0.ffn.gate.tid2eid"].int()

    source = checkpoint("tiny-swa")
    assert_same(load(rewrite(source, tmp_path, change)), load(source))


def test_shards_with_an_index(checkpoint: Checkpoint, tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "sharded", preset="tiny", max_shard_bytes=500_000)
    assert len(list(directory.glob("*.safetensors"))) > 5
    assert_same(load(directory), load(checkpoint("tiny")))


def test_the_result_outlives_the_files(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "gone", preset="tiny-swa")
    tensors = load(directory)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    for file in directory.glob("*.safetensors"):
        file.write_bytes(b"\xff" * file.stat().st_size)
        file.unlink()
    assert_same(tensors, before)


@pytest.mark.gpu
def test_a_gpu_gets_the_same_bits(checkpoint: Checkpoint) -> None:
    directory = checkpoint("tiny", quant=True)
    config = load_model_config(directory)
    for rank in range(4):
        there = load_parameters(directory, config, TpInfo(rank, 4), torch.bfloat16, torch.device("cuda")).tensors
        assert all(tensor.is_cuda for tensor in there.values())
        assert_same({name: tensor.cpu() for name, tensor in there.items()}, load(directory, rank, 4, torch.bfloat16))


def test_group_sizes_that_do_not_divide(checkpoint: Checkpoint) -> None:
    with pytest.raises(ConfigError, match="o_groups = 4"):
        load(checkpoint("tiny"), 0, 8)


@pytest.mark.parametrize("fp8_format", list(Fp8Format))
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (1, 2)])
def test_projections_that_stay_fp8_are_the_stored_values(
    fp8_format: Fp8Format, rank: int, size: int, checkpoint: Checkpoint
) -> None:
    directory = checkpoint("flash-layer", quant=True)
    config = load_model_config(directory)
    plain = load(directory, rank, size)
    kept = load_parameters(directory, config, TpInfo(rank, size), torch.float32, CPU, keep_fp8=fp8_format).tensors
    scales = {name for name in kept if name.endswith(".scale") and name.removesuffix("scale") + "weight" in kept}
    names = {name.removesuffix("scale") + "weight" for name in scales}
    assert names == {name for name in plain if re.search(r"attn\.(indexer\.)?(wq_a|wq_b|wkv|wo_a|wo_b)\.weight", name)}
    assert kept.keys() - scales == plain.keys()
    for name in plain.keys() - names:
        assert torch.equal(kept[name], plain[name]), name
    for name in names:
        assert kept[name].dtype == fp8_format.torch_dtype
        scale = kept[name.removesuffix("weight") + "scale"].repeat_interleave(128, 0).repeat_interleave(128, 1)
        assert torch.equal(decode_fp8(kept[name], fp8_format) * scale, plain[name]), name


def test_shares_with_ragged_blocks_do_not_stay_fp8(checkpoint: Checkpoint) -> None:
    directory = checkpoint("tiny", quant=True)
    config = load_model_config(directory)
    kept = load_parameters(directory, config, TpInfo(), torch.float32, CPU, keep_fp8=Fp8Format.OCP).tensors
    assert_same(kept, load(directory))
