"""How long the driver plans a decode step: the scheduler's choice, and the packing of the packet."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Any

from dsv4dist.bench.report import time_calls
from dsv4dist.cache.blocks import BlockManager
from dsv4dist.cache.groups import cache_groups, plan_num_blocks
from dsv4dist.cache.prefix_cache import PrefixCache
from dsv4dist.config.presets import preset_config
from dsv4dist.engine.request import Request, SamplingParams
from dsv4dist.engine.scheduler import ScheduledRequest, Scheduler
from dsv4dist.engine.step_plan import build_step_plan

MEMORY_BYTES = 1 << 60
"""No limit: plans take of it what the requests need."""


def bench_scheduler(num_requests: list[int], context: int, repeats: int) -> list[dict[str, Any]]:
    """Rows for decode steps of so many running requests of DeepSeek-V4-Flash, each with `context` tokens.

    method  `plan`: choose requests and give them blocks; `pack`: build their packet
    """
    rows = []
    for count in num_requests:
        scheduler = _decoding(count, context)

        def advance(chosen: list[ScheduledRequest], scheduler: Scheduler = scheduler) -> None:
            for one in chosen:
                one.request.output_token_ids.append(0)
            scheduler.advance(chosen)

        spreads = {
            "plan": time_calls(scheduler.plan, repeats, after=advance),
            "pack": time_calls(partial(_pack, scheduler.plan()), repeats),
        }
        for method, spread in spreads.items():
            rows.append(
                {"bench": "scheduler", "method": method, "requests": count, "context": context, **asdict(spread)}
            )
    return rows


def _pack(chosen: list[ScheduledRequest]) -> object:
    return build_step_plan(chosen, 0, 0).pack()


def _decoding(count: int, context: int) -> Scheduler:
    """A scheduler whose `count` requests have their prompts behind them."""
    groups = cache_groups(preset_config("flash"), "fp8_ds_mla")
    budget = max(2048, count)
    blocks = BlockManager(groups, plan_num_blocks(groups, MEMORY_BYTES, count, budget, 2 * context, retain=True))
    scheduler = Scheduler(blocks, count, budget, PrefixCache(blocks))
    for index in range(count):
        scheduler.add(Request(str(index), [index % 1000] * context, SamplingParams(max_tokens=context), 0, 2 * context))
    while any(not request.is_decoding for request in (*scheduler.running, *scheduler.waiting)):
        chosen = scheduler.plan()
        for one in chosen:
            if one.request.num_computed + one.num_tokens == one.request.num_tokens:
                one.request.output_token_ids.append(0)
        scheduler.advance(chosen)
    return scheduler
