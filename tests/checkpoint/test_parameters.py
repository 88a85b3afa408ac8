"""The parameter table against what the releases publish: tensor counts and total bytes of their index files."""

from __future__ import annotations

import pytest

from dsv4dist.checkpoint.parameters import Parameter, Role, Shard, Storage, draft_parameters, model_parameters
from dsv4dist.config.model import ModelConfig
from dsv4dist.config.presets import preset_config
from dsv4dist.distributed.shard import shard_shape
from dsv4dist.distributed.tp import TpInfo, allowed_tp_sizes


def stored(parameter: Parameter) -> tuple[int, int]:
    """Tensors and bytes of one parameter in a release, its scale included (checkpoint spec 2)."""
    size = 1
    for part in parameter.shape:
        size *= part
    if parameter.storage is Storage.FP8:
        rows, columns = parameter.shape
        return 2, size + -(-rows // 128) * -(-columns // 128)
    if parameter.storage is Storage.FP4:
        return 2, size // 2 + size // 32
    return 1, size * {Storage.BF16: 2, Storage.FP32: 4, Storage.INT64: 8}[parameter.storage]


@pytest.mark.parametrize(
    ("release", "tensors", "total_bytes"),
    [("flash", 69_187, 159_609_485_896), ("pro", 145_116, 864_704_792_696)],
    ids=["flash", "pro"],
)
def test_published_totals(release: str, tensors: int, total_bytes: int) -> None:
    config = preset_config(release)
    sizes = [stored(parameter) for parameter in (*model_parameters(config), *draft_parameters(config))]
    assert sum(count for count, _ in sizes) == tensors
    assert sum(num_bytes for _, num_bytes in sizes) == total_bytes


@pytest.fixture(scope="module")
def flash() -> ModelConfig:
    return preset_config("flash")


def test_names_are_unique_and_roles_fit(flash: ModelConfig) -> None:
    parameters = list(model_parameters(flash))
    assert len({parameter.name for parameter in parameters}) == len(parameters)
    for parameter in parameters:
        assert (parameter.role is Role.INDEX) == (parameter.storage is Storage.INT64)
        if parameter.storage is Storage.FP32 or len(parameter.shape) == 1:
            assert parameter.role is Role.EXACT, parameter.name


def test_what_is_sharded(flash: ModelConfig) -> None:
    by_name = {parameter.name: parameter for parameter in model_parameters(flash)}
    rank = TpInfo(3, 8)
    expected = {
        "embed.weight": (16160, 4096),
        "head.weight": (16160, 4096),
        "layers.2.attn.attn_sink": (8,),
        "layers.2.attn.wq_a.weight": (1024, 4096),
        "layers.2.attn.wq_b.weight": (4096, 1024),
        "layers.2.attn.wkv.weight": (512, 4096),
        "layers.2.attn.wo_a.weight": (1024, 4096),
        "layers.2.attn.wo_b.weight": (4096, 1024),
        "layers.2.attn.indexer.wq_b.weight": (8192, 1024),
        "layers.2.ffn.experts.7.w1.weight": (256, 4096),
        "layers.2.ffn.experts.7.w2.weight": (4096, 256),
        "layers.2.ffn.shared_experts.w3.weight": (256, 4096),
        "layers.2.ffn.gate.weight": (256, 4096),
    }
    for name, shape in expected.items():
        assert shard_shape(by_name[name].shape, by_name[name].shard, rank) == shape, name
    assert by_name["layers.2.attn.wo_b.weight"].shard is Shard.COLUMNS


def test_allowed_sizes() -> None:
    assert [n for n in allowed_tp_sizes(preset_config("flash")) if n <= 16] == [1, 2, 4, 8]
    assert [n for n in allowed_tp_sizes(preset_config("pro")) if n <= 32] == [1, 2, 4, 8, 16]
