"""What the engine is doing, as numbers: kept by itself, and shown through Ray's metrics where Ray runs."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from dsv4dist.cache.prefix_cache import PrefixStats
from dsv4dist.engine.scheduler import Scheduler

PREFIX = "dsv4dist_"
STEP_BOUNDARIES_S = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0]
GAUGES = {
    "running_requests": "Requests that run",
    "waiting_requests": "Requests that wait",
    "tokens_per_second": "Generated tokens a second, over the last steps",
    "block_use": "Share of a cache group's blocks that requests use",
}
COUNTERS = {
    "preemptions": "Requests that gave their blocks to an older one",
    "cached_tokens": "Prompt tokens found in the prefix cache",
    "prefix_queries": "Requests looked up in the prefix cache",
    "prefix_hits": "Requests that resumed behind a cached prefix",
    "prefix_shortened_hits": "Requests whose cached prefix was longer than what they could resume behind",
    "prefix_evictions": "Cached blocks given to a new owner",
    "generated_tokens": "Generated tokens",
    "computed_tokens": "Rows of all steps",
    "draft_tokens": "Drafts that were verified",
    "accepted_draft_tokens": "Drafts that were right",
    "recoveries": "Times that lost ranks were started again",
    "recovery_seconds": "Seconds that this took",
}
RATE_SPAN_S = 10.0


@dataclass
class Metrics:
    """Gauges and counters after the newest step; `values` has one number per name, block use one per group."""

    values: dict[str, float] = field(default_factory=dict)
    block_use: dict[str, float] = field(default_factory=dict)
    _exported: dict[str, Any] | None = None
    _recent: deque[tuple[float, float, int]] = field(default_factory=deque)
    """When each of the last steps began and ended, and its new tokens."""
    _recent_tokens: int = 0

    def record_recoveries(self, recoveries: int, seconds: float) -> None:
        """Account for all recoveries so far; Ray learns of them with the next step."""
        self.values |= {"recoveries": recoveries, "recovery_seconds": seconds}

    def record_step(
        self, scheduler: Scheduler, step_s: float, num_rows: int, num_new_tokens: int, acceptance: tuple[int, int]
    ) -> None:
        """Account for a step that took `step_s`, computed `num_rows` rows and gave `num_new_tokens` tokens.

        acceptance  drafts so far: right ones, all
        """
        now = time.monotonic()
        self._recent.append((now - step_s, now, num_new_tokens))
        self._recent_tokens += num_new_tokens
        self.values |= {
            "generated_tokens": self.values.get("generated_tokens", 0) + num_new_tokens,
            "accepted_draft_tokens": acceptance[0],
            "draft_tokens": acceptance[1],
            "step_seconds": step_s,
        }
        self.record_rows(num_rows)
        self.record_state(scheduler)
        if self._exported:
            self._exported["step_seconds"].observe(step_s)

    def record_rows(self, num_rows: int) -> None:
        """Account for a step that computed `num_rows` rows; Ray learns of them with the next state."""
        self.values["computed_tokens"] = self.values.get("computed_tokens", 0) + num_rows

    def record_state(self, scheduler: Scheduler) -> None:
        """Take the numbers that change without a step too, and hand all to Ray."""
        if not self.values.keys() >= {"generated_tokens", "computed_tokens"}:
            return  # no step has run
        now = time.monotonic()
        while self._recent and now - self._recent[0][1] >= RATE_SPAN_S:
            self._recent_tokens -= self._recent.popleft()[2]
        cache = scheduler.prefix_cache
        stats = cache.stats if cache is not None else PrefixStats()
        self.values |= {
            "running_requests": len(scheduler.running),
            "waiting_requests": scheduler.num_waiting,
            "tokens_per_second": self._recent_tokens / (now - self._recent[0][0]) if self._recent else 0.0,
            "preemptions": scheduler.num_preemptions,
            "cached_tokens": stats.reused_tokens,
            "prefix_queries": stats.queries,
            "prefix_hits": stats.hits,
            "prefix_shortened_hits": stats.shortened_hits,
            "prefix_evictions": cache.evictions if cache is not None else 0,
        }
        self.block_use = {name: pool.num_used / pool.num_blocks for name, pool in scheduler.blocks.pools.items()}
        self._export()

    def _export(self) -> None:
        """Hand the numbers to Ray, if this process is connected to one."""
        if self._exported is None:
            self._exported = _ray_metrics()
        if not self._exported:
            return
        for name in GAUGES:
            if name != "block_use":
                self._exported[name].set(self.values[name])
        for name, use in self.block_use.items():
            self._exported["block_use"].set(use, tags={"group": name})
        for name in COUNTERS:
            counter, before = self._exported[name]
            if self.values[name] > before:
                counter.inc(self.values[name] - before)
                self._exported[name] = (counter, self.values[name])


def _ray_metrics() -> dict[str, Any]:
    """Ray's metric objects by name; empty in a process that has not connected to Ray."""
    import sys

    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return {}
    from ray.util.metrics import Counter, Gauge, Histogram

    found: dict[str, Any] = {}
    for name, text in GAUGES.items():
        tags = ("group",) if name == "block_use" else ()
        found[name] = Gauge(PREFIX + name, description=text, tag_keys=tags)
    for name, text in COUNTERS.items():
        found[name] = (Counter(PREFIX + name, description=text), 0.0)
    found["step_seconds"] = Histogram(PREFIX + "step_seconds", "Seconds of a step", STEP_BOUNDARIES_S)
    return found
