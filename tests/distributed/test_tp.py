"""Which group sizes a model allows, and that shards tile the whole."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4dist.config.model import parse_model_config
from dsv4dist.distributed.shard import Shard, shard_shape, shard_slices
from dsv4dist.distributed.tp import TpInfo, check_tp_size
from dsv4dist.errors import ConfigError
from tests.config.test_model import FLASH, PRO


@pytest.mark.parametrize(("raw", "allowed"), [(FLASH, {1, 2, 4, 8}), (PRO, {1, 2, 4, 8, 16})])
def test_exactly_the_dividing_sizes_are_accepted(raw: dict[str, object], allowed: set[int]) -> None:
    config = parse_model_config(raw)
    for size in range(1, 33):
        if size in allowed:
            check_tp_size(config, size)
        else:
            with pytest.raises(ConfigError, match=f"tensor parallel size {size} does not divide"):
                check_tp_size(config, size)


def test_the_refusal_names_the_number_and_the_choices() -> None:
    with pytest.raises(ConfigError, match=r"o_groups = 8.*use one of 1, 2, 4, 8$"):
        check_tp_size(parse_model_config(FLASH), 16)


@given(
    size=st.sampled_from([1, 2, 3, 4]),
    share=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    shard=st.sampled_from(Shard),
)
def test_shards_tile_the_tensor(size: int, share: tuple[int, int], shard: Shard) -> None:
    shape = (share[0] * size, share[1] * size)
    full = np.arange(np.prod(shape)).reshape(shape)
    parts = [full[shard_slices(shape, shard, TpInfo(rank, size))] for rank in range(size)]
    assert all(part.shape == shard_shape(shape, shard, TpInfo(0, size)) for part in parts)
    if shard is Shard.REPLICATED:
        assert all((part == full).all() for part in parts)
    else:
        assert (np.concatenate(parts, axis=0 if shard is Shard.ROWS else 1) == full).all()
