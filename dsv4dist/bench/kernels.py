"""Every kernel on a GPU: microseconds by replays of captured graphs, beside the floor that the same run measured."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from typing import Any

import torch

from dsv4dist.bench.attention_cases import SPLITS, attention_cases, indexer_cases, planned_splits, prefill_cases
from dsv4dist.bench.cases import Case, CaseSkippedError, Sizes, shared_cache
from dsv4dist.bench.device_time import Ceilings, cache_bytes, measure_ceilings, num_sets, time_graph
from dsv4dist.bench.linear_cases import linear_cases
from dsv4dist.bench.memory_cases import memory_cases
from dsv4dist.errors import UnsupportedError

Row = dict[str, Any]


def all_cases(sizes: Sizes, ops: tuple[str, ...] = ()) -> list[Case]:
    """The cases of the operations named, or of all of them; cases of one operation stand together."""
    families = (attention_cases, prefill_cases, indexer_cases, memory_cases, linear_cases)
    found = [case for family in families for case in family(sizes) if not ops or case.op in ops]
    order = list(dict.fromkeys(case.op for case in found))
    return sorted(found, key=lambda case: order.index(case.op))


def op_names() -> list[str]:
    """The operations that can be asked for."""
    return list(dict.fromkeys(case.op for case in all_cases(Sizes())))


def bench_kernels(bench: str, sizes: Sizes, ops: tuple[str, ...], replays: int, jobs: int) -> Iterator[Row]:
    """Rows of all cases of `ops`, as they are measured: times, floor, and what the floor was computed from.

    bench    what rows say in their field of that name
    jobs     processes that compile all kernels before the first measurement
    Inputs rotate inside a graph: `cold` says that more than twice the device's cache passes between two uses of a set.
    A case that fails gives a row with `error`, one that the machine has no operation for a row with `skipped`.
    Raises: UnsupportedError where there is no GPU.
    """
    device = gpu_for(bench)
    cases = all_cases(sizes, ops)
    _compile_first(sizes, ops, jobs)
    ceilings, spreads = measure_ceilings(device, replays)
    yield from _ceiling_rows(bench, ceilings, spreads)
    for op, group in itertools.groupby(cases, lambda case: case.op):
        start, of_op = time.perf_counter(), list(group)
        for case in of_op:
            yield measure(bench, case, device, ceilings, replays)
        _say(f"{op}: {len(of_op)} cases in {time.perf_counter() - start:.1f} s")
        torch.cuda.empty_cache()
    shared_cache.cache_clear()


def sweep_splits(bench: str, sizes: Sizes, replays: int) -> Iterator[Row]:
    """One row per decode shape: the best split count of a sweep, and the planned one with its time.

    Raises: UnsupportedError where there is no GPU.
    """
    device = gpu_for(bench)
    ceilings, spreads = measure_ceilings(device, replays)
    yield from _ceiling_rows(bench, ceilings, spreads)
    for case in attention_cases(sizes):
        heads, keys, queries = (case.fields[name] for name in ("heads", "selected", "queries"))
        only = Sizes(heads=(heads,), decode=((keys, queries),), window=sizes.window, cache_slots=sizes.cache_slots)
        planned = planned_splits(heads, keys, queries, sizes.window, device)
        counts = sorted({planned, *SPLITS})
        rows = {
            count: measure(bench, next(attention_cases(only, count)), device, ceilings, replays) for count in counts
        }
        times = {count: row["median_us"] for count, row in rows.items() if "median_us" in row}
        best = min(times, key=lambda count: times[count], default=None)
        sweep = " ".join(f"{count}:{value:.1f}" for count, value in times.items())
        found = {"best_splits": best, "best_us": times.get(best or 0), "sweep_us": sweep}
        yield rows[planned] | found


def measure(bench: str, case: Case, device: torch.device, ceilings: Ceilings, replays: int) -> Row:
    """The row of one case; whatever it raises becomes part of the row, so that the others still run."""
    row = {"bench": bench, "op": case.op, "method": case.method, **case.fields}
    sets = num_sets(case.bytes_moved, cache_bytes(device))
    torch.manual_seed(0)
    try:
        row |= case.about(device)
        spread = time_graph([case.make(device) for _ in range(sets)], replays)
    except CaseSkippedError as reason:
        return row | {"skipped": str(reason)}
    except Exception as error:  # one case must not cost the others
        text = str(error).strip().splitlines() or [""]
        return row | {"error": f"{type(error).__name__}: {text[0]}"}
    floor = ceilings.floor_us(case.bytes_moved, case.flops, case.fp8)
    return row | {
        **asdict(spread),
        "floor_us": floor,
        "ratio_to_floor": spread.median_us / floor,
        "bytes": case.bytes_moved,
        "flops": case.flops,
        "cold": sets * case.bytes_moved >= 2 * cache_bytes(device),
    }


def _ceiling_rows(bench: str, ceilings: Ceilings, spreads: dict[str, Any]) -> Iterator[Row]:
    reached = {
        "copy": {"gb_per_s": ceilings.copy_bytes / 1e3},
        "matmul bf16": {"tflop_per_s": ceilings.bf16_flops / 1e6},
        "matmul fp8": {"tflop_per_s": ceilings.fp8_flops / 1e6},
    }
    for what, spread in spreads.items():
        yield {"bench": bench, "op": "ceiling", "method": what, **asdict(spread), **reached[what]}


def gpu_for(bench: str) -> torch.device:
    """The GPU to measure on.  Raises: UnsupportedError where there is none."""
    if not torch.cuda.is_available():
        raise UnsupportedError(f"bench {bench}: timings need a GPU, and torch sees none; run it on a machine with one")
    return torch.device("cuda", torch.cuda.current_device())


def _compile_first(sizes: Sizes, ops: tuple[str, ...], jobs: int) -> None:
    """Fill Triton's cache of compiled kernels with several processes; what fails shows up when it is measured."""
    jobs = jobs or min(8, os.cpu_count() or 1)
    if jobs == 1:
        return
    start = time.perf_counter()
    groups: dict[str, list[int]] = {}
    for index, case in enumerate(all_cases(sizes, ops)):
        if case.method.startswith("torch"):
            continue
        variant = [case.op, *(str(case.fields.get(name)) for name in ("heads", "rows", "dtype", "compressor"))]
        groups.setdefault(" ".join(variant), []).append(index)
    try:
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            list(pool.map(_run_once, itertools.repeat(sizes), itertools.repeat(ops), groups.values()))
    except BrokenExecutor:
        _say("a compiling process was lost; what is missing is compiled between measurements")
    _say(f"compiled in {time.perf_counter() - start:.1f} s")


def _run_once(sizes: Sizes, ops: tuple[str, ...], indices: list[int]) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    cases = all_cases(sizes, ops)
    for index in indices:
        try:
            cases[index].make(device)()
            torch.cuda.synchronize()
        except Exception:  # the measurement meets it again, and reports it
            continue


def _say(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)
