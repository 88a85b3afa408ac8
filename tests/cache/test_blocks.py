"""Block ownership under random request lives: nothing owned twice, nothing lost, windows always covered."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4dist.cache.blocks import BlockManager, BlockTables
from dsv4dist.cache.groups import CacheGroup, cache_groups, check_num_blocks, plan_num_blocks
from dsv4dist.config.model import parse_model_config
from dsv4dist.errors import ConfigError
from tests.config.test_model import FLASH

GROUPS = (
    CacheGroup("window", 64, 128, 1),
    CacheGroup("compressed", 256, None, 1),
    CacheGroup("csa_state", 4, 8, 1, period=4),
    CacheGroup("hca_state", 8, 128, 1, period=128),
)


def check_ownership(manager: BlockManager, running: list[BlockTables]) -> None:
    """Every block has as many users as tables that list it, and all others are available."""
    for group in manager.groups:
        pool = manager.pools[group.name]
        owned = Counter(block for tables in running if group.name in tables for block in tables[group.name].blocks)
        assert all(pool.num_users(block) == owned[block] for block in range(pool.num_blocks))
        assert len(owned) + pool.num_available == pool.num_blocks


def readable_from(group: CacheGroup, num_computed: int) -> int:
    """The oldest token that tokens from num_computed on read, by the definition of a window and of an entry."""
    if group.window is None:
        return 0
    first_reader = num_computed
    while (first_reader + 1) % group.period:
        first_reader += 1
    return max(0, first_reader - group.window + 1)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), max_seqs=st.integers(1, 6), budget=st.integers(1, 300))
def test_windows_never_run_out_and_nothing_leaks(seed: int, max_seqs: int, budget: int) -> None:
    rng = random.Random(seed)
    num_blocks = plan_num_blocks(GROUPS, 10**6, max_seqs, budget, 1000)
    manager = BlockManager(GROUPS, num_blocks)
    running: list[tuple[BlockTables, list[int]]] = []
    for _ in range(60):
        if len(running) < max_seqs and rng.random() < 0.5:
            running.append((BlockTables(), [0, rng.randint(1, 1000)]))
        left = budget
        for tables, progress in running:
            step = min(left, rng.choice([1, 1, 7, 300]), progress[1] - progress[0])
            left -= step
            assert manager.extend(tables, progress[0] + step)
            for group in GROUPS if tables else ():
                table = tables[group.name]
                assert table.first_block * group.block_tokens <= readable_from(group, progress[0])
                assert (table.first_block + len(table.blocks)) * group.block_tokens >= progress[0] + step
            progress[0] += step
        check_ownership(manager, [tables for tables, _ in running])
        for tables, progress in running:
            manager.release_passed(tables, progress[0])
        for one in [one for one in running if one[1][0] == one[1][1] or rng.random() < 0.1]:
            manager.free(one[0])
            running.remove(one)
        check_ownership(manager, [tables for tables, _ in running])
    for tables, _ in running:
        manager.free(tables)
    assert all(manager.num_free(group.name) == num_blocks[group.name] for group in GROUPS)


def test_an_extension_that_does_not_fit_changes_nothing() -> None:
    manager = BlockManager(GROUPS, {"window": 20, "compressed": 4, "csa_state": 300, "hca_state": 200})
    assert manager.max_tokens() == 1024
    first, second = BlockTables(), BlockTables()
    assert manager.extend(first, 700)
    assert not manager.extend(second, 300)
    assert not second
    assert manager.extend(second, 256)
    check_ownership(manager, [first, second])


def test_flash_bytes_per_block() -> None:
    """Against hand arithmetic: pages of 37,440 bytes a window; CSA 21 x (37,440 + 8,640), HCA 20 x 1,728 bytes."""
    groups = {group.name: group for group in cache_groups(parse_model_config(FLASH), "fp8_ds_mla")}
    assert groups["window"].block_bytes == 43 * 37440
    assert groups["compressed"].block_bytes == 21 * (37440 + 8640) + 20 * 1728
    assert groups["csa_state"].block_bytes == 21 * (32768 + 8192)
    assert groups["hca_state"].block_bytes == 20 * 32768
    drafting = {group.name: group for group in cache_groups(parse_model_config(FLASH), "fp8_ds_mla", 1)}
    assert drafting["window"].block_bytes == 44 * 37440


@pytest.mark.parametrize("retain", [False, True])
def test_a_plan_fits_its_memory_and_its_largest_step(retain: bool) -> None:
    groups = cache_groups(parse_model_config(FLASH), "fp8_ds_mla")
    memory = 40 << 30
    plan = plan_num_blocks(groups, memory, 64, 2048, 32768, retain=retain)
    assert sum(plan[group.name] * group.block_bytes for group in groups) <= memory
    for group in groups:
        if group.window is not None:
            assert plan[group.name] >= group.live_blocks(64, 2048, 32768)


def test_too_little_memory_is_named() -> None:
    plan = plan_num_blocks(GROUPS, 10, 4, 100, 1000)
    with pytest.raises(ConfigError, match=r"window, compressed, csa_state, hca_state; raise --kv-cache-memory-bytes"):
        check_num_blocks(plan)
