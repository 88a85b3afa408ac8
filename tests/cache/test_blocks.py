"""Block ownership under random request lives: nothing owned twice, nothing lost, windows always covered."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4dist.cache.blocks import BlockManager, GroupBlocks
from dsv4dist.cache.groups import CacheGroup, cache_groups, check_num_blocks, plan_num_blocks
from dsv4dist.config.model import parse_model_config
from dsv4dist.errors import ConfigError
from tests.config.test_model import FLASH

GROUPS = (
    CacheGroup("window", 64, 128, 1),
    CacheGroup("compressed", 256, None, 1),
    CacheGroup("csa_state", 4, 8, 1),
    CacheGroup("hca_state", 8, 128, 1),
)


def _check_ownership(manager: BlockManager, running: list[dict[str, GroupBlocks]]) -> None:
    for group in manager.groups:
        owned = [block for tables in running if group.name in tables for block in tables[group.name].blocks]
        assert len(owned) == len(set(owned))
        assert len(owned) + manager.num_free(group.name) == manager.num_blocks[group.name]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), max_seqs=st.integers(1, 6), budget=st.integers(1, 300))
def test_windows_never_run_out_and_nothing_leaks(seed: int, max_seqs: int, budget: int) -> None:
    rng = random.Random(seed)
    num_blocks = plan_num_blocks(GROUPS, 10**6, max_seqs, budget, 1000)
    manager = BlockManager(GROUPS, num_blocks)
    running: list[tuple[dict[str, GroupBlocks], list[int]]] = []
    for _ in range(60):
        if len(running) < max_seqs and rng.random() < 0.5:
            total = rng.randint(1, 1000)
            assert manager.reserve(total)
            running.append(({}, [0, total]))
        left = budget
        for tables, progress in running:
            step = min(left, rng.choice([1, 1, 7, 300]), progress[1] - progress[0])
            left -= step
            manager.extend(tables, progress[0] + step)
            for group in GROUPS:
                first = max(0, progress[0] - (group.window - 1)) if group.window else 0
                table = tables[group.name]
                assert table.first_block * group.block_tokens <= first
                assert (table.first_block + len(table.blocks)) * group.block_tokens >= progress[0] + step
            progress[0] += step
        _check_ownership(manager, [tables for tables, _ in running])
        for tables, progress in running:
            manager.release_passed(tables, progress[0])
        for one in [one for one in running if one[1][0] == one[1][1] or rng.random() < 0.1]:
            manager.free(one[0], one[1][1])
            running.remove(one)
        _check_ownership(manager, [tables for tables, _ in running])
    for tables, progress in running:
        manager.free(tables, progress[1])
    assert all(manager.num_free(group.name) == num_blocks[group.name] for group in GROUPS)
    assert manager.reserve(num_blocks["compressed"] * 256)


def test_a_reservation_that_does_not_fit_changes_nothing() -> None:
    manager = BlockManager(GROUPS, {"window": 9, "compressed": 4, "csa_state": 9, "hca_state": 99})
    assert manager.max_tokens() == 1024
    assert manager.reserve(700)
    assert not manager.reserve(300)
    assert manager.reserve(256)


def test_flash_bytes_per_token() -> None:
    """Against hand arithmetic: 584 bytes a token per window; CSA 21 x (37,440 + 8,640), HCA 20 x 1,728 a 256-block."""
    groups = {group.name: group for group in cache_groups(parse_model_config(FLASH), "fp8_ds_mla")}
    assert groups["window"].block_bytes == 43 * 37440
    assert groups["compressed"].block_bytes == 21 * (37440 + 8640) + 20 * 1728
    assert groups["csa_state"].block_bytes == 21 * (32768 + 8192)
    assert groups["hca_state"].block_bytes == 20 * 32768


def test_too_little_memory_is_named() -> None:
    plan = plan_num_blocks(GROUPS, 10, 4, 100, 1000)
    with pytest.raises(ConfigError, match=r"window, compressed, csa_state, hca_state; raise --kv-cache-memory-bytes"):
        check_num_blocks(plan)
