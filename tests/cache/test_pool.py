"""Cache memory: every cache of every layer is a region of its own."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from dsv4dist.cache.groups import cache_groups, plan_num_blocks
from dsv4dist.cache.pool import allocate_caches, cache_tensors
from dsv4dist.config.model import parse_model_config
from dsv4dist.kernels.paged_cache import Fp8Format
from tests.config.test_model import FLASH

CONFIG = parse_model_config(
    FLASH | {"num_hidden_layers": 5, "compress_ratios": [0, 4, 128, 4, 4], "num_hash_layers": 0}
)


@pytest.mark.parametrize("dtype", ["fp8_ds_mla", "bfloat16", "float32"])
def test_writing_one_cache_changes_no_other(dtype: str) -> None:
    blocks = plan_num_blocks(cache_groups(CONFIG, dtype, 1), 1 << 26, 2, 64, 512)
    caches = allocate_caches(CONFIG, blocks, dtype, Fp8Format.FNUZ, torch.device("cpu"), True, num_draft_layers=1)
    memory = [tensor.view(torch.uint8).flatten() for tensor in cache_tensors(caches)]
    assert len(memory) == 6 + 3 * 4 + 2  # windows; CSA: entries, states, index keys and their states; HCA: two
    regions = sorted((one.data_ptr(), one.data_ptr() + one.numel()) for one in memory)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(regions))
    for value, one in enumerate(memory):
        one.fill_(value)
    assert all(bool((one == value).all()) for value, one in enumerate(memory))
