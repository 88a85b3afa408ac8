"""Every measured case runs on a CPU at tiny sizes; floors are those counted by hand; failures cost one row only."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from itertools import groupby
from typing import Any

import pytest
import torch

import tests.kernels.implementations  # noqa: F401  # before triton
from dsv4dist.bench import kernels
from dsv4dist.bench.attention_cases import attention_cases, planned_splits, prefill_cases
from dsv4dist.bench.cases import Case, CaseSkippedError, Linear, Sizes, model_linears, shared_cache
from dsv4dist.bench.device_time import MAX_SETS, MIN_SETS, Ceilings, num_sets
from dsv4dist.bench.report import Spread
from dsv4dist.errors import UnsupportedError
from dsv4dist.kernels._triton import sparse_decode
from tests.support.poison import uninitialised_memory_poisoned

CPU = torch.device("cpu")
TINY = Sizes(
    heads=(2,),
    decode=((40, 1),),
    window=16,
    cache_slots=128,
    index_slots=384,
    prefill_heads=(2,),
    prefill=((4, 16),),
    prefill_entries=64,
    indexer=((2, 160),),
    top_k=16,
    tokens=(1, 2),
    context=128,
    key_list_widths=(16,),
    hidden=128,
    q_rank=128,
    gather=((2, 20),),
    linear_rows=(2,),
    linears=(Linear("tiny", "wq_b", 1, 128, 256), Linear("tiny", "wo_a", 1, 128, 128, 2)),
)
H200 = Ceilings(copy_bytes=4.25e6, bf16_flops=702e6, fp8_flops=1404e6)
"""What the peers' floors in docs/performance.md were computed from."""


@pytest.fixture(autouse=True)
def _forget_caches() -> Iterator[None]:
    yield
    shared_cache.cache_clear()


def tensors(result: object) -> list[torch.Tensor]:
    return [one for one in (result if isinstance(result, tuple) else (result,)) if isinstance(one, torch.Tensor)]


WRITTEN = {"compress_state": 3, "compress_store": 7, "q_rope_kv_insert": 4}
"""Which argument is the cache that an operation writes to."""
OPTIONAL = ("torch scaled_mm, 128-blocks", "torch scaled_mm, one scale per row")
"""Methods that a machine or a version of torch may lack."""


@pytest.mark.parametrize("case", kernels.all_cases(TINY), ids=lambda case: f"{case.op}-{case.method}-{case.fields}")
def test_every_case_runs_and_does_what_it_is_counted_for(case: Case) -> None:
    try:
        call: Any = case.make(CPU)
    except CaseSkippedError:
        assert case.method in OPTIONAL
        return
    written = call.args[WRITTEN[case.op]].data if case.op in WRITTEN else torch.zeros(1)
    before = written.clone()
    with uninitialised_memory_poisoned():
        results = tensors(call())
    for x in results:
        assert torch.isfinite(x.float()).all()
        assert x.float().any(), "nothing but zeros"
    assert (case.op in WRITTEN) == (not torch.equal(written, before)), "the cache that it writes to"
    if case.op.endswith("key_list"):
        indices, indptr = results
        assert indptr[-1] == len(indices) == case.fields["tokens"] * case.fields["width"], "lists are full"
        assert (indices >= 0).all()
    if case.op == "combine_indices":
        assert (results[1] == case.fields["width"]).all(), "lists are full"
    if case.op.startswith(("topk", "indexer_logits+")):
        assert results[0].unique().numel() >= TINY.top_k


@pytest.mark.parametrize("op", ["sparse_attention", "rms_norm", "fp8_linear"])
def test_input_sets_differ(op: str) -> None:
    case = next(iter(kernels.all_cases(TINY, (op,))))
    first, second = (tensors(case.make(CPU)()) for _ in range(2))
    assert not torch.equal(first[0], second[0])


def test_the_default_cases_are_told_apart_by_their_fields_and_name_their_shapes() -> None:
    cases = kernels.all_cases(Sizes())
    rows = [{"op": case.op, "method": case.method, **case.fields} for case in cases]
    assert len({json.dumps(row) for row in rows}) == len(rows)
    assert all(case.bytes_moved > 0 for case in cases)
    ops = [op for op, _ in groupby(rows, lambda row: row["op"])]
    assert ops == kernels.op_names(), "cases of one operation stand together"
    decode = [row for row in rows if row["op"] == "sparse_attention"]
    assert {row["heads"] for row in decode} == {8, 16, 32, 64, 128}
    assert {(row["selected"], row["queries"]) for row in decode} >= {(512, 1), (1024, 512), (8192, 8), (8192, 32)}
    assert [case.op for case in kernels.all_cases(Sizes(), ("rms_norm",))] == ["rms_norm"] * 4


def test_the_projections_are_those_of_the_releases() -> None:
    found = {(one.model, one.layer, one.tp): (one.n, one.k, one.groups) for one in model_linears((1, 8))}
    assert found == {
        ("flash", "wq_a_wkv", 1): (1536, 4096, 1), ("pro", "wq_a_wkv", 1): (2048, 7168, 1),
        ("flash", "wq_b", 1): (32768, 1024, 1), ("flash", "wq_b", 8): (4096, 1024, 1),
        ("flash", "wo_b", 1): (4096, 8192, 1), ("flash", "wo_b", 8): (4096, 1024, 1),
        ("flash", "wo_a", 1): (1024, 4096, 8), ("flash", "wo_a", 8): (1024, 4096, 1),
        ("pro", "wq_b", 1): (65536, 1536, 1), ("pro", "wq_b", 8): (8192, 1536, 1),
        ("pro", "wo_b", 1): (7168, 16384, 1), ("pro", "wo_b", 8): (7168, 2048, 1),
        ("pro", "wo_a", 1): (1024, 4096, 16), ("pro", "wo_a", 8): (1024, 4096, 2),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("heads", "selected", "queries", "floor_us"),
    [
        (64, 512, 32, 3.8), (64, 512, 128, 15.3), (64, 512, 512, 61.2), (16, 512, 8, 0.76), (16, 512, 128, 12.2),
        (8, 512, 1, 0.09), (8, 512, 8, 0.73), (8, 512, 32, 2.9), (8, 512, 128, 11.8), (8, 512, 512, 47.0),
        (16, 1024, 128, 21.2), (16, 1024, 512, 85.0), (64, 8192, 8, 12.4), (8, 8192, 32, 36.7),
    ],
)  # fmt: skip
def test_decode_floors_are_those_of_the_recorded_comparison(
    heads: int, selected: int, queries: int, floor_us: float
) -> None:
    (case,) = attention_cases(Sizes(heads=(heads,), decode=((selected, queries),)))
    assert H200.floor_us(case.bytes_moved, case.flops) == pytest.approx(floor_us, rel=0.03, abs=0.006)


@pytest.mark.parametrize(("heads", "floor_us"), [(8, 61), (16, 122), (64, 489)])
def test_prefill_floors_are_those_of_the_recorded_comparison(heads: int, floor_us: float) -> None:
    for case in prefill_cases(Sizes().with_heads((heads,))):
        assert H200.floor_us(case.bytes_moved, case.flops) == pytest.approx(floor_us, rel=0.01)


@pytest.mark.parametrize(
    ("op", "shape", "num_bytes"),
    [
        ("rms_norm", {"tokens": 4096}, 4096 * 4096 * 4),
        ("qr_kv_norm_quantised", {"tokens": 4096}, 4096 * (1536 * 2 + 1024 + 32 + 1024)),
        ("q_rope_kv_insert", {"tokens": 4096, "heads": 64}, 4096 * (2 * 64 * 1024 + 1024 + 584)),
        ("compress_state", {"tokens": 4096, "compressor": "csa"}, 4096 * 2048 * 8),
        ("compress_store", {"tokens": 4096, "compressor": "hca"}, 32 * (128 * 1024 * 4 + 584)),
        ("compress_store", {"tokens": 4096, "compressor": "index"}, 1024 * (8 * 256 * 4 + 132)),
        ("gather_dequant", {}, 32768 * (584 + 1024)),
        ("indexer_logits", {"queries": 16}, 16 * 32768 * 136),
        ("fp8_linear", {"layer": "wo_b", "model": "pro", "tp": 1, "rows": 8}, 7168 * 16384 + 8 * 16384 * 2),
    ],
)
def test_bytes_are_counted_once_in_and_once_out(op: str, shape: dict[str, Any], num_bytes: int) -> None:
    found = [one for one in kernels.all_cases(Sizes(), (op,)) if shape.items() <= one.fields.items()]
    assert found[0].bytes_moved == pytest.approx(num_bytes, rel=0.01)


def test_planned_splits_are_those_of_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[int] = []
    monkeypatch.setattr(sparse_decode, "_launch", lambda *args: launched.append(args[7]))
    for case in attention_cases(Sizes(heads=(2, 40), decode=((200, 1), (40, 3)), cache_slots=256)):
        case.make(CPU)()
        assert case.about(CPU) == {"splits": launched[-1]}
    assert planned_splits(2, 200, 1, 128, CPU) > 1


def test_sets_pass_twice_the_cache_within_bounds() -> None:
    assert num_sets(10 << 20, 50 << 20) == 10
    assert num_sets(1, 50 << 20) == MAX_SETS
    assert num_sets(1 << 40, 50 << 20) == MIN_SETS


# ---- Running, with a clock that is none ------------------------------------------------------------------------------


@pytest.fixture
def no_gpu_needed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Calls run on the CPU and take a microsecond; returns how many each case had."""
    calls_of: list[int] = []

    def time_graph(calls: Sequence[Callable[[], object]], replays: int) -> Spread:
        for call in calls:
            call()
        calls_of.append(len(calls))
        return Spread(2.0, 1.0, 3.0)

    monkeypatch.setattr(kernels, "time_graph", time_graph)
    monkeypatch.setattr(kernels, "cache_bytes", lambda device: 1)
    monkeypatch.setattr(kernels, "gpu_for", lambda bench: CPU)
    monkeypatch.setattr(kernels, "measure_ceilings", lambda device, replays: (H200, {"copy": Spread(1.0, 1.0, 1.0)}))
    return calls_of


def test_rows_have_the_fields_of_the_contract(no_gpu_needed: list[int]) -> None:
    ceiling, *rows = kernels.bench_kernels("kernels", TINY, ("inverse_rope", "window_key_list"), replays=5, jobs=1)
    assert ceiling["op"] == "ceiling"
    assert ceiling["gb_per_s"] == pytest.approx(4250)
    assert [(row["op"], row["tokens"]) for row in rows] == [
        ("inverse_rope", 1), ("inverse_rope", 2), ("window_key_list", 1), ("window_key_list", 2),
    ]  # fmt: skip
    for row in rows:
        assert {field.name for field in fields(Spread)} | {"bench", "method", "floor_us", "cold"} <= set(row)
        assert row["ratio_to_floor"] == pytest.approx(2.0 / row["floor_us"])
    assert no_gpu_needed == [MIN_SETS] * 4


def test_a_failing_case_is_a_row_and_the_others_still_run(
    no_gpu_needed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(device: torch.device) -> Callable[[], object]:
        raise RuntimeError("first line\nsecond line")

    def skip(device: torch.device) -> Callable[[], object]:
        raise CaseSkippedError("no such product")

    cases = [
        Case("a", "triton", {}, fail, 1),
        Case("b", "torch", {}, skip, 1),
        Case("c", "triton", {}, lambda d: id, 1),
    ]
    cases[2] = Case("c", "triton", {}, lambda device: lambda: None, 1)
    monkeypatch.setattr(kernels, "all_cases", lambda sizes, ops: cases)
    _, a, b, c = kernels.bench_kernels("kernels", TINY, (), replays=1, jobs=1)
    assert a == {"bench": "kernels", "op": "a", "method": "triton", "error": "RuntimeError: first line"}
    assert b == {"bench": "kernels", "op": "b", "method": "torch", "skipped": "no such product"}
    assert c["median_us"] == 2.0


def test_a_sweep_shows_the_best_count_beside_the_planned_one(
    no_gpu_needed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    def attend(q: torch.Tensor, *rest: object, num_splits: int, **more: object) -> torch.Tensor:
        tried.append(num_splits)
        return q

    def time_graph(calls: Sequence[Callable[[], object]], replays: int) -> Spread:
        calls[0]()
        return Spread(abs(tried[-1] - 4) + 1.0, 1.0, 1.0)

    monkeypatch.setattr(sparse_decode, "sparse_attention", attend)
    monkeypatch.setattr(kernels, "time_graph", time_graph)
    _, row = kernels.sweep_splits("attention", TINY, replays=1)
    assert row["best_splits"] == 4
    assert row["best_us"] == 1.0
    assert row["splits"] == planned_splits(2, 40, 1, 16, CPU)
    assert row["median_us"] == abs(row["splits"] - 4) + 1.0
    assert f"{row['splits']}:" in row["sweep_us"]


def test_without_a_gpu_nothing_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match=r"bench prefill: timings need a GPU"):
        next(kernels.bench_kernels("prefill", TINY, (), replays=1, jobs=1))


@pytest.mark.gpu
def test_a_gpu_measures_an_operation_of_each_kind() -> None:
    ops = ("sparse_attention", "rms_norm", "indexer_logits", "fp8_linear", "grouped_wo_a")
    sizes = Sizes(
        heads=(8,),
        decode=((512, 8),),
        indexer=((1, 4096),),
        tokens=(64,),
        linear_rows=(8,),
        linears=model_linears((8,)),
    )
    rows = list(kernels.bench_kernels("kernels", sizes, ops, replays=3, jobs=2))
    assert not [row for row in rows if "error" in row]
    assert all(row["p10_us"] <= row["median_us"] <= row["p90_us"] for row in rows if "skipped" not in row)
