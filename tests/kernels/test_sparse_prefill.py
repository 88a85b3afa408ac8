"""Sparse prefill against float64 loops, and gathered rows against the caches they came from."""

from __future__ import annotations

import math

import pytest
import torch

from dsv4dist.errors import ShapeError
from dsv4dist.kernels.block_table import BlockTable
from dsv4dist.kernels.paged_cache import CacheFormat, PagedCache
from dsv4dist.kernels.reference import key_lists
from dsv4dist.kernels.reference.combine_indices import combine_indices, compact_rows
from dsv4dist.kernels.reference.gather_dequant import gather_dequant
from dsv4dist.kernels.reference.sparse_attention import sparse_attention
from dsv4dist.kernels.segments import Segment
from tests.kernels.implementations import Implementation, implementations
from tests.kernels.test_sparse_decode_triton import OCP, Pages, attend, check, generator, segment, stored
from tests.support.poison import uninitialised_memory_poisoned

IMPLEMENTATIONS = implementations("sparse_prefill.sparse_prefill")
SCALE = 512**-0.5
FAR = [-1, -(2**31), 2**31 - 1]


def ragged(lists: list[list[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Lists as indices and indptr; what lies behind the last list must not be looked at."""
    ends = torch.tensor([0, *(len(one) for one in lists)]).cumsum(0).int()
    flat = torch.tensor([row for one in lists for row in one] + [0, 1, 2], dtype=torch.int32)
    return flat.to(device), ends.to(device)


def run(impl: Implementation, q: torch.Tensor, rows: torch.Tensor, lists: list[list[int]],
        **options: object) -> torch.Tensor:  # fmt: skip
    device = impl.device
    moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    with uninitialised_memory_poisoned():
        out = impl.op(q.to(device), rows.to(device), *ragged(lists, device), moved.pop("sink", None), SCALE, **moved)
    return out.cpu().double()


def expected(q: torch.Tensor, rows: torch.Tensor, lists: list[list[int]], sink: torch.Tensor | None) -> torch.Tensor:
    keys = [[rows[row].double() for row in one if 0 <= row < len(rows)] for one in lists]
    return attend(q, keys, sink)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_lengths_absent_rows_and_sinks(impl: Implementation, dtype: torch.dtype) -> None:
    rng = generator(1)
    rows = torch.randn(140, 512, generator=rng).to(dtype)
    rows[139] = math.nan  # never listed, nor is row 0 read for absent ones
    rows[0] = math.nan
    lists = [torch.randperm(138, generator=rng)[:n].add(1).tolist() for n in (0, 1, 15, 16, 17, 127, 130)]
    lists[5][3:6] = FAR
    lists.append([140] * 40)
    q = torch.randn(len(lists), 3, 512, generator=rng).to(dtype)
    tolerance = 2e-5 if dtype == torch.float32 else 4e-3 if dtype == torch.float16 else 2e-2
    for sink in (None, torch.tensor([0.5, -math.inf, 80.0, math.nan])):
        got = run(impl, q, rows, lists, sink=sink)
        check(got, expected(q, rows, lists, sink), tolerance)
        assert (got[0] == 0).all()
        assert (got[-1] == 0).all()


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("num_heads", [1, 8, 16, 17, 64])
def test_heads_rotation_and_strides(impl: Implementation, num_heads: int) -> None:
    rng = generator(num_heads)
    rows = torch.randn(40, 520, generator=rng).half()[:, 8:]
    q = torch.randn(2, num_heads + 1, 528, generator=rng).half().to(impl.device)
    out = torch.full((2, num_heads + 1, 520), 7.5, dtype=torch.float16, device=impl.device)
    lists = [list(range(33)), [39, 2]]
    positions = torch.tensor([49, 3])
    angle = torch.rand(50, 32, generator=rng) * 6
    got = run(impl, q[:, 1:, 8:520], rows, lists, positions=positions,
              cos_sin=torch.cat((angle.cos(), angle.sin()), 1), out=out[:, :num_heads, :512])  # fmt: skip
    want = expected(q[:, 1:, 8:520].cpu(), rows, lists, None)
    turn = torch.polar(torch.ones(2, 32, dtype=torch.float64), -angle[positions].double())
    pairs = torch.view_as_complex(want[..., 448:].reshape(2, num_heads, 32, 2).contiguous())
    want[..., 448:] = torch.view_as_real(pairs * turn.unsqueeze(1)).flatten(-2)
    check(got, want, 4e-3)
    assert (out[:, num_heads:] == 7.5).all()
    assert (out[:, :, 512:] == 7.5).all()


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_a_chunk_gives_what_the_caches_give(impl: Implementation) -> None:
    """Two requests, gathered and combined as the specification's chunk, against attention over the caches in place."""
    window, ratio, top_k = 128, 4, 8
    seq_lens, query_lens = [140, 30], [5, 30]
    pages, entries = Pages(4, 64, OCP), Pages(2, 64, OCP)
    pages.store_random(range(256), 2)
    entries.store_random(range(128), 3)
    tables = (BlockTable(torch.tensor([[2, 0, 1], [3, -1, -1]]).int(), torch.zeros(2).int(), 64),
              BlockTable(torch.tensor([[1], [0]]).int(), torch.zeros(2).int(), 64))  # fmt: skip
    token_to_req = torch.repeat_interleave(torch.arange(2), torch.tensor(query_lens))
    positions = torch.cat([torch.arange(s - n, s) for s, n in zip(seq_lens, query_lens, strict=True)])
    visible = (positions + 1) // ratio
    selected = torch.where(torch.arange(top_k) < visible.unsqueeze(1), torch.arange(top_k), -1).int()

    seq = torch.tensor(seq_lens)
    gathered = torch.tensor([n + min(s - n, window - 1) for s, n in zip(seq_lens, query_lens, strict=True)])
    num_entries = int(seq.max()) // ratio
    workspace = torch.full((2, num_entries + int(gathered.max()), 512), math.nan, dtype=torch.bfloat16)
    cpu = [PagedCache(one.data, 64, CacheFormat.FP8_DS_MLA, OCP) for one in (pages, entries)]
    gather_dequant(cpu[1], tables[1], seq // ratio, None, workspace, 0)
    gather_dequant(cpu[0], tables[0], seq, gathered, workspace, num_entries)
    dense, lens = combine_indices(selected, token_to_req, positions, visible, seq, gathered, top_k, window, num_entries,
                                  workspace.shape[1])  # fmt: skip
    rows = workspace.flatten(0, 1)
    indices, indptr = compact_rows(dense, lens, len(rows))

    q = torch.randn(len(positions), 4, 512, generator=generator(4)).bfloat16()
    sink = torch.randn(4, generator=generator(5))
    main = Segment(cpu[0], *key_lists.window_key_list(tables[0], token_to_req, positions, window))
    extra = Segment(cpu[1], *key_lists.entry_key_list(tables[1], token_to_req, selected))
    want = sparse_attention(q.float(), main, extra, sink, SCALE)
    device = impl.device
    got = impl.op(*(x.to(device) for x in (q, rows, indices, indptr, sink)), SCALE)
    check(got.cpu().double(), want.double(), 2e-2)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS[1:])
def test_wrong_input_is_refused(impl: Implementation) -> None:
    q, rows = torch.zeros(2, 1, 512), torch.zeros(4, 512)
    with pytest.raises(ShapeError, match=r"indptr: expected contiguous int32 \[3\]"):
        run(impl, q, rows, [[1]])
    with pytest.raises(ShapeError, match="rows"):
        run(impl, q, rows[:, :256], [[1], [2]])
    with pytest.raises(ShapeError, match="both or neither"):
        run(impl, q, rows, [[1], [2]], positions=torch.zeros(2).long())
    assert run(impl, q[:0], rows, []).shape == (0, 1, 512)


@pytest.mark.gpu
@pytest.mark.parametrize("impl", IMPLEMENTATIONS[2:])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_heads", [8, 33, 64, 100, 128])
def test_more_queries_than_programs(impl: Implementation, num_heads: int, dtype: torch.dtype) -> None:
    """Programs that go from query to query: lists of every length in turn, also empty ones and ones without a row."""
    rng = generator(num_heads)
    rows = torch.randn(700, 512, generator=rng).to(dtype)
    rows[650:] = math.nan  # not listed
    lists = [torch.randperm(650, generator=rng)[:n].tolist() for n in (0, 1, 63, 64, 65, 127, 128, 129, 640, 3) * 20]
    for which in range(0, len(lists), 10):
        lists[which + 3][5:9] = [*FAR, 700]
        lists[which + 7][:64] = [-1] * 64
        lists[which + 9] = [-1, -1, 5000]
    q = torch.randn(len(lists), num_heads, 512, generator=rng).to(dtype)
    sink = torch.randn(num_heads, generator=rng)
    got = run(impl, q, rows, lists, sink=sink)
    check(got, expected(q, rows, lists, sink), 4e-3 if dtype == torch.float16 else 2e-2)
    assert (got[::10] == 0).all()
    assert (got[9::10] == 0).all()


# ---- In place on Hopper ----------------------------------------------------------------------------------------------


@pytest.fixture
def hopper() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the in-place kernels are for Hopper")


def in_place(q: torch.Tensor, main: Segment, extra: Segment | None, sink: torch.Tensor | None,
             positions: torch.Tensor | None = None, table: torch.Tensor | None = None) -> torch.Tensor:  # fmt: skip
    from dsv4dist.kernels._triton import sparse_decode
    from dsv4dist.kernels._triton.hopper_prefill import launch_in_place

    q, sink, positions, table = (None if x is None else x.cuda() for x in (q, sink, positions, table))
    assert q is not None
    traits = sparse_decode.traits_of(q.device)
    sources = [sparse_decode._source(main, traits),
               sparse_decode._absent(q) if extra is None else sparse_decode._source(extra, traits)]  # fmt: skip
    with uninitialised_memory_poisoned():
        out = torch.empty_like(q)
    launch_in_place(q, *sources, sink, SCALE * sparse_decode.LOG2_E, positions, table, out)
    return out.cpu().double()


@pytest.mark.gpu
@pytest.mark.parametrize("num_heads", [1, 8, 12, 16, 33, 64, 128])
def test_in_place_over_two_caches(hopper: None, num_heads: int) -> None:
    main, extra = Pages(4, 64, OCP), Pages(70, 2, OCP)
    main.store_random(range(1, 256), 1)
    extra.store_random(range(1, 140), 2)
    rng = generator(3)
    lists = [torch.randperm(255, generator=rng)[:n].add(1).tolist() for n in (0, 1, 127, 128, 129)]
    lists[3][5:9] = [-1, 256, 2**31 - 1, -(2**31)]
    others = [torch.randperm(139, generator=rng)[:n].add(1).tolist() for n in (0, 0, 5, 130, 64)]
    others[4][:60] = [-1] * 60
    q = torch.randn(5, num_heads, 512, generator=rng).bfloat16()
    sink = torch.randn(num_heads, generator=rng)
    keys = [stored(main, a) + stored(extra, b) for a, b in zip(lists, others, strict=True)]
    got = in_place(q, segment(main.cache(), lists), segment(extra.cache(), others), sink)
    check(got, attend(q, keys, sink), 2e-2)
    assert (got[0] == 0).all()
    got = in_place(q, segment(main.cache(), lists), None, None)
    check(got, attend(q, [stored(main, one) for one in lists], None), 2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("num_heads", [8, 64])
def test_in_place_every_byte_nan_and_overflow(hopper: None, num_heads: int) -> None:
    pages = Pages(1, 4, OCP)
    every = torch.arange(448).remainder(256).to(torch.uint8)
    scale = torch.tensor([105, 112, 119, 120, 127, 128, 134], dtype=torch.uint8)
    rope = torch.linspace(-9, 9, 64)
    finite = torch.where(torch.isin(every, torch.tensor([0x7F, 0xFF])), 0, every).to(torch.uint8)
    pages.store(0, finite, scale, rope)  # in fp16
    rope[7] = math.nan
    pages.store(1, every.roll(100), scale.flip(0), rope)  # again in bf16
    pages.store(2, torch.full((448,), 0x7E, dtype=torch.uint8), scale + 10, torch.ones(64))  # beyond fp16
    got = in_place(torch.zeros(3, num_heads, 512).bfloat16(), segment(pages.cache(), [[0], [1], [2]]), None, None)
    want = torch.stack([pages.keys[slot] for slot in range(3)]).unsqueeze(1).expand(-1, num_heads, -1)
    check(got, want, 2**-8)


@pytest.mark.gpu
@pytest.mark.parametrize("num_heads", [8, 16, 64])
def test_in_place_many_queries_rotated(hopper: None, num_heads: int) -> None:
    main, extra = Pages(8, 64, OCP), Pages(16, 64, OCP)
    main.store_random(range(512), 6)
    extra.store_random(range(1024), 7)
    rng, count = generator(8), 600
    lists = [list(range(max(0, end - 128), end)) for end in range(1, 513)] + [list(range(384, 512))] * (count - 512)
    others = [torch.randperm(1024, generator=rng)[:512].tolist() for _ in range(count)]
    a, b = segment(main.cache(), lists), segment(extra.cache(), others)
    q = torch.randn(count, num_heads, 512, generator=rng).bfloat16()
    sink, positions = torch.randn(num_heads, generator=rng), torch.randint(0, 50, (count,), generator=rng)
    angle = torch.rand(50, 32, generator=rng) * 6
    table = torch.cat((angle.cos(), angle.sin()), 1)
    got = in_place(q, a, b, sink, positions, table)
    moved = [x.cuda() for x in (q.float(), sink, positions, table)]
    want = sparse_attention(moved[0], a, b, moved[1], SCALE, moved[2], moved[3])
    check(got, want.cpu().double(), 2e-2)
