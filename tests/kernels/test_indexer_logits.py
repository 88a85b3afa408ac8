"""Index scores against float64 loops over the bytes of hand-written pages: both encodings, rows, every length."""

from __future__ import annotations

import math

import pytest
import torch

from tests.kernels.implementations import HAS_GPU, Implementation, implementations
from tests.support.e4m3 import random_bytes, values_of
from tests.support.pages import slot_of
from tests.support.poison import poisoned, uninitialised_memory_poisoned

from dsv4dist.errors import ShapeError, UnsupportedError  # isort: skip
from dsv4dist.kernels._triton import indexer_logits as triton_logits  # isort: skip
from dsv4dist.kernels.block_table import BlockTable  # isort: skip
from dsv4dist.kernels.paged_cache import CacheFormat, Fp8Format, PagedCache  # isort: skip
from dsv4dist.kernels.reference import indexer as reference_indexer  # isort: skip

SELECT = implementations("indexer.select_key_list", triton="indexer_logits")
LOGITS = implementations("indexer.indexer_logits", triton="indexer_logits")
OCP, FNUZ = Fp8Format.OCP, Fp8Format.FNUZ
LENGTHS = (0, 1, 3, 4, 63, 64, 65, 127, 128, 129)
DIM = 128
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")


class Keys:
    """The pages of a few requests in shuffled blocks, poison everywhere else, and every stored key in float64."""

    def __init__(
        self, num_entries: list[int], block_size: int, fp8_format: Fp8Format | None, seed: int, dim: int = DIM,
        dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        columns = max(-(-n // block_size) for n in num_entries) + 1
        order = torch.randperm(len(num_entries) * columns, generator=generator).int()
        self.blocks = order.view(len(num_entries), columns)
        self.keys = torch.zeros(len(num_entries), columns * block_size, dim, dtype=torch.float64)
        if fp8_format is None:
            self.data = poisoned(order.numel(), block_size, dim, dtype=dtype)
        else:
            page, stride = block_size * 132, block_size * 132 + 64
            memory = poisoned(order.numel() * stride, dtype=torch.uint8)
            self.data = memory.as_strided((order.numel(), page), (stride, 1))
        self.block_size, self.fp8_format = block_size, fp8_format
        for req, count in enumerate(num_entries):
            for entry in range(count):
                if fp8_format is None:
                    self.store(req, entry, torch.randn(dim, generator=generator).to(dtype))
                else:
                    exponent = int(torch.randint(-8, 1, (), generator=generator))
                    self.store(req, entry, random_bytes((dim,), fp8_format, generator), 2.0**exponent)

    def store(self, req: int, entry: int, row: torch.Tensor, scale: float = 1.0) -> None:
        block, place = int(self.blocks[req, entry // self.block_size]), entry % self.block_size
        if self.fp8_format is None:
            self.data[block, place] = row
            self.keys[req, entry] = row.double()
            return
        self.data[block, place * DIM : (place + 1) * DIM] = row
        first = self.block_size * DIM + place * 4
        self.data[block, first : first + 4] = torch.tensor([scale]).view(torch.uint8)
        self.keys[req, entry] = values_of(row, self.fp8_format) * scale

    def on(self, device: torch.device) -> tuple[PagedCache, BlockTable]:
        fp8 = self.fp8_format is not None
        data = self.data
        if device.type != "cpu":  # keep the gaps between pages
            data = self.data.to(device) if not fp8 else poisoned(
                data.shape[0] * data.stride(0), dtype=torch.uint8, device=device
            ).as_strided(data.shape, data.stride()).copy_(data)  # fmt: skip
        cache = PagedCache(data, self.block_size, CacheFormat.FP8_INDEX if fp8 else CacheFormat.ROWS, self.fp8_format)
        first = torch.zeros(len(self.blocks), dtype=torch.int32, device=device)
        return cache, BlockTable(self.blocks.to(device), first, self.block_size)


def expected(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """float64 scores [entries] of one token: sum over heads of weight * relu(q . k) (spec 1.6)."""
    total = torch.zeros(len(keys), dtype=torch.float64)
    for head in range(len(q)):
        total += weights[head].double() * (keys @ q[head]).clamp_min(0)
    return total


def query(shape: tuple[int, ...], kind: Fp8Format | torch.dtype, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A query of an encoding or a float dtype, and its float64 values."""
    generator = torch.Generator().manual_seed(seed)
    if isinstance(kind, Fp8Format):
        data = random_bytes(shape, kind, generator)
        return data.view(kind.torch_dtype), values_of(data, kind)
    q = torch.randn(shape, generator=generator).to(kind)
    return q, q.double()


def check(implementation: Implementation, keys: Keys, kind: Fp8Format | torch.dtype, heads: int, **tuning: int) -> None:
    """Tokens of three requests with every length, scores compared below the length, nothing written beyond it."""
    lens = [n for n in LENGTHS for _ in range(2)]
    reqs = sorted(i % 3 for i in range(len(lens)))
    q, values = query((len(lens), heads, keys.keys.shape[2]), kind, seed=1)
    weights = torch.randn(len(lens), heads, generator=torch.Generator().manual_seed(2))
    device = implementation.device
    cache, table = keys.on(device)
    arguments = (q.to(device), weights.to(device), cache, table, torch.tensor(reqs).to(device))
    with uninitialised_memory_poisoned():
        found = implementation.op(*arguments, torch.tensor(lens).to(device), **tuning).cpu()
    assert found.dtype == torch.float32
    for token, (req, length) in enumerate(zip(reqs, lens, strict=True)):
        want = expected(values[token], weights[token], keys.keys[req, :length])
        # Terms cancel between heads; the bound is on their sizes. A GPU's fp8 product keeps some 14 bits of each.
        size = expected(values[token].abs(), weights[token].abs(), keys.keys[req, :length].abs())
        error = ((found[token, :length] - want).abs() / (size + 1e-30)).max().item() if length else 0.0
        assert error < (1e-3 if device.type == "cuda" else 1e-5), f"token {token}, {length} entries: {error}"


@pytest.mark.parametrize("implementation", LOGITS)
@pytest.mark.parametrize("fp8_format", list(Fp8Format))
@pytest.mark.parametrize("block_size", [16, 64])
def test_fp8_keys(implementation: Implementation, fp8_format: Fp8Format, block_size: int) -> None:
    check(implementation, Keys([129, 129, 129], block_size, fp8_format, seed=3), fp8_format, heads=5)


@pytest.mark.parametrize("implementation", LOGITS)
@pytest.mark.parametrize(("keys_dtype", "q_dtype"), [
    (torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16),
    (torch.bfloat16, torch.float32),
])  # fmt: skip
def test_plain_rows(implementation: Implementation, keys_dtype: torch.dtype, q_dtype: torch.dtype) -> None:
    check(implementation, Keys([129, 129, 129], 16, None, seed=4, dim=48, dtype=keys_dtype), q_dtype, heads=3)


@pytest.mark.parametrize("implementation", LOGITS)
def test_float_query_of_fp8_keys(implementation: Implementation) -> None:
    check(implementation, Keys([129, 129, 129], 64, OCP, seed=5), torch.bfloat16, heads=4)


@pytest.mark.parametrize("implementation", LOGITS[1:])
def test_several_tokens_a_program(implementation: Implementation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that hold tokens of two requests, and keys split between programs."""
    monkeypatch.setattr(triton_logits, "MANY_TOKENS", 1)
    check(implementation, Keys([129, 129, 129], 64, OCP, seed=6), OCP, heads=5, max_entries=200, num_splits=2)


@pytest.mark.parametrize("implementation", LOGITS)
def test_layout_of_a_block(implementation: Implementation) -> None:
    """One-hot keys with scales 2^(entry mod 8): any other arrangement of bytes or scales shows."""
    keys = Keys([64], 64, OCP, seed=7)
    for entry in range(64):
        row = torch.zeros(DIM, dtype=torch.uint8)
        row[entry] = 0x38  # 1.0
        keys.store(0, entry, row, 2.0 ** (entry % 8))
    q = torch.zeros(2, 1, DIM)
    q[0, 0] = torch.arange(DIM) % 13 + 1
    q[1, 0, 5] = 1.0
    cache, table = keys.on(implementation.device)
    q8 = q.to(torch.float8_e4m3fn).to(implementation.device)
    rows = [torch.tensor(x, device=implementation.device) for x in ([0, 0], [64, 64])]
    found = implementation.op(q8, torch.ones(2, 1, device=implementation.device), cache, table, *rows).cpu()
    entry = torch.arange(64)
    assert torch.equal(found[0, :64], (entry % 13 + 1) * 2.0 ** (entry % 8))
    assert torch.equal(found[1, :64], torch.where(entry == 5, 32.0, 0.0))


@pytest.mark.parametrize("implementation", LOGITS)
def test_meaning_of_a_score(implementation: Implementation) -> None:
    """A negative product counts as 0, a negative weight counts, and an entry not yet visible is not there."""
    keys = Keys([40], 16, None, seed=8, dim=32)
    keys.store(0, 30, torch.full((32,), 100.0))
    q = torch.stack((keys.data.new_ones(32), -torch.ones(32)))[None]
    weights = torch.tensor([[2.0, -0.5]])
    device = implementation.device
    cache, table = keys.on(device)
    lens = torch.tensor([20], device=device)
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    found = implementation.op(q.to(device), weights.to(device), cache, table, zero, lens).cpu()
    products = keys.keys[0, :20].sum(1)
    want = torch.where(products > 0, 2.0 * products, 0.5 * products)
    assert torch.allclose(found[0, :20].double(), want, atol=1e-4)
    topk = implementations("indexer.topk_entries", triton="topk")
    pick = {p.id: p.values[0] for p in topk}[implementation.name].op  # type: ignore[attr-defined]
    best = sorted(sorted(range(20), key=lambda e: -float(found[0, e]))[:8])
    assert pick(found.to(device), lens, 8).tolist() == [best]


@pytest.mark.parametrize("implementation", LOGITS)
def test_entries_that_are_not_there_score_zero(implementation: Implementation) -> None:
    keys = Keys([64], 16, OCP, seed=9)
    device = implementation.device
    cache, table = keys.on(device)
    table.blocks[0, 1] = -1
    table.blocks[0, 3] = 1000
    q, values = query((1, 2, DIM), OCP, seed=10)
    weights = torch.tensor([[1.0, 0.5]])
    rows = [torch.tensor(x, device=device) for x in ([0], [96])]  # 96 entries: more than the table's five blocks
    found = implementation.op(q.to(device), weights.to(device), cache, table, *rows).cpu()[0]
    want = expected(values[0], weights[0], keys.keys[0])
    for block in range(6):
        part = slice(16 * block, 16 * block + 16)
        if block in (0, 2):
            assert torch.allclose(found[part].double(), want[part], rtol=2e-3, atol=1.0)
        elif block != 4:  # block 4 is there but was never written
            assert not found[part].any(), f"block {block}"


@pytest.mark.parametrize("implementation", LOGITS)
def test_damaged_keys_are_nan_and_only_they(implementation: Implementation) -> None:
    """A key with a NaN scale, or a NaN row, must rank last, and must not reach its neighbours."""
    device = implementation.device
    for fp8_format in (OCP, None):
        keys = Keys([32], 16, fp8_format, seed=11, dim=DIM)
        row = torch.zeros(DIM, dtype=torch.uint8) if fp8_format else torch.full((DIM,), math.nan)
        keys.store(0, 9, row, math.nan)
        q, _ = query((1, 2, DIM), fp8_format or torch.float32, seed=12)
        cache, table = keys.on(device)
        rows = [torch.tensor(x, device=device) for x in ([0], [32])]
        found = implementation.op(q.to(device), torch.ones(1, 2, device=device), cache, table, *rows).cpu()[0, :32]
        assert found.isnan().nonzero().flatten().tolist() == [9]


def test_slices_of_a_prompt_equal_the_whole() -> None:
    """Logits in slices of a byte budget select what one slice selects, and what the reference selects."""
    keys = Keys([50, 30], 16, None, seed=13, dim=32)
    tokens = 21
    q, _ = query((tokens, 2, 32), torch.float32, seed=14)
    weights = torch.rand(tokens, 2)
    reqs = torch.tensor([0] * 14 + [1] * 7)
    lens = torch.tensor([*range(37, 51), *range(5, 12)])  # the last rows select all they have
    cache, table = keys.on(DEVICE)
    arguments = (q.to(DEVICE), weights.to(DEVICE), cache, table, reqs.to(DEVICE), lens.to(DEVICE), 12)
    with uninitialised_memory_poisoned():
        whole = triton_logits.select_key_list(*arguments)
        parts = triton_logits.select_key_list(*arguments, max_entries=64, logits_bytes=3 * 64 * 4)
    on_cpu = keys.on(torch.device("cpu"))
    expected, ends = reference_indexer.select_key_list(q, weights, *on_cpu, reqs, lens, 12, 64)
    assert ends.tolist() == [0, *(torch.minimum(lens, torch.tensor(12)).cumsum(0).tolist())]
    for indices, indptr in (whole, parts):
        assert indices.numel() == tokens * 12
        assert torch.equal(indptr.cpu(), ends)
        assert torch.equal(indices[: int(ends[-1])].cpu(), expected)
    nothing = triton_logits.select_key_list(*(x[:0] for x in arguments[:2]), cache, table, reqs[:0], lens[:0], 12)
    assert [one.tolist() for one in nothing] == [[], [0]]


@pytest.mark.parametrize("implementation", SELECT)
def test_a_planted_key_far_back_is_selected(implementation: Implementation) -> None:
    """A needle at the far end of 10,400 tokens: one selected entry gives way to it, which was not taken before."""
    count, k, heads = 2600, 512, 64
    keys = Keys([count], 64, OCP, seed=11)
    q, values = query((1, heads, DIM), OCP, seed=12)
    weights = torch.rand(1, heads, generator=torch.Generator().manual_seed(13))
    device = implementation.device
    _, on_cpu = keys.on(torch.device("cpu"))

    def select() -> set[int]:
        cache, table = keys.on(device)
        rows = torch.tensor([0]).to(device), torch.tensor([count]).to(device)
        with uninitialised_memory_poisoned():
            slots, ends = implementation.op(q.to(device), weights.to(device), cache, table, *rows, k, count)
        assert ends.tolist() == [0, k]
        entry_of = {slot_of(on_cpu, 0, entry): entry for entry in range(count)}
        return {entry_of[slot] for slot in slots[:k].tolist()}

    before = select()
    needle = next(entry for entry in range(count) if entry not in before)
    assert needle < 20
    mean = values[0].mean(0)
    row = (mean / mean.abs().max() * 400).to(torch.float8_e4m3fn).view(torch.uint8)
    keys.store(0, needle, row, 2.0**4)
    after = select()
    assert needle in after
    assert after - before == {needle}
    assert len(before - after) == 1


def test_logits_of_a_slice_stay_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """16,384 tokens with 4,096 entries each: 268 MB at once, less under a smaller budget, never the model's maximum."""
    sizes: list[int] = []

    def record(q: torch.Tensor, *_: object, max_entries: int) -> torch.Tensor:
        sizes.append(q.shape[0] * max_entries * 4)
        return torch.empty(q.shape[0], 1).expand(-1, max_entries)

    monkeypatch.setattr(triton_logits, "indexer_logits", record)
    monkeypatch.setattr(triton_logits, "topk_slots", lambda *_: None)
    keys = Keys([1], 64, None, seed=15, dim=1)
    cache, table = keys.on(torch.device("cpu"))
    tokens = 16_384
    arguments = (
        torch.empty(tokens, 1, 1),
        torch.empty(tokens, 1),
        cache,
        table,
        torch.zeros(tokens, dtype=torch.int64),
    )
    lens = torch.full((tokens,), 4096)
    triton_logits.select_key_list(*arguments, lens, 8)
    assert sizes == [tokens * 4096 * 4]
    sizes.clear()
    triton_logits.select_key_list(*arguments, lens, 8, logits_bytes=1 << 20)
    assert max(sizes) <= 1 << 20
    assert sum(sizes) == tokens * 4096 * 4


@pytest.mark.gpu
@pytest.mark.parametrize("fp8_format", list(Fp8Format))
def test_long_rows_and_replays(fp8_format: Fp8Format) -> None:
    """Many tokens and few, 8,192 entries, captured with one length and replayed with others."""
    keys = Keys([64], 64, fp8_format, seed=16)
    blocks = 128
    generator = torch.Generator().manual_seed(17)
    data = random_bytes((blocks, 64 * 132), fp8_format, generator)
    data[:, 64 * DIM :] = torch.full((blocks, 64), 0.25).view(torch.uint8)
    rows = values_of(data[:, : 64 * DIM].reshape(blocks * 64, DIM), fp8_format).float().cuda() * 0.25
    cache = PagedCache(data.cuda(), 64, CacheFormat.FP8_INDEX, fp8_format)
    table = BlockTable(torch.arange(blocks, dtype=torch.int32, device="cuda")[None], keys.on(DEVICE)[1].first_block, 64)
    for tokens in (3, 700):
        q, values = query((tokens, 64, DIM), fp8_format, seed=18)
        weights = torch.rand(tokens, 64, device="cuda")
        reqs = torch.zeros(tokens, dtype=torch.int64, device="cuda")
        lens = torch.full((tokens,), 8192, device="cuda")
        call = (q.cuda(), weights, cache, table, reqs, lens)
        triton_logits.indexer_logits(*call, max_entries=8192)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = triton_logits.indexer_logits(*call, max_entries=8192)
        lens.copy_(torch.randint(0, 8193, (tokens,)))
        out.fill_(math.nan)
        graph.replay()
        for token in range(0, tokens, max(1, tokens // 7)):
            length = int(lens[token])
            terms = torch.relu(rows[:length] @ values[token].float().cuda().T) * weights[token]
            error = (out[token, :length] - terms.sum(1)).abs() / (terms.sum(1) + 1e-30)
            assert length == 0 or error.max() < 2e-3
            assert out[token, length:].isnan().all()


@pytest.mark.gpu
def test_pages_beyond_four_gigabytes() -> None:
    """Blocks whose byte offset needs more than 32 bits."""
    stride = 3 << 30
    memory = torch.empty(2 * stride + 64 * 132, dtype=torch.uint8, device="cuda")
    data = memory.as_strided((3, 64 * 132), (stride, 1))
    data[2] = 0x38
    data[2, 64 * DIM :] = torch.ones(64).view(torch.uint8).cuda()
    cache = PagedCache(data, 64, CacheFormat.FP8_INDEX, OCP)
    table = BlockTable(torch.tensor([[2]], dtype=torch.int32).cuda(), torch.zeros(1, dtype=torch.int32).cuda(), 64)
    q = torch.ones(1, 64, DIM, device="cuda").to(torch.float8_e4m3fn)
    zero, lens = torch.zeros(1, dtype=torch.int64, device="cuda"), torch.tensor([64], device="cuda")
    found = triton_logits.indexer_logits(q, torch.ones(1, 64, device="cuda"), cache, table, zero, lens)
    assert torch.equal(found.cpu(), torch.full((1, 64), 64.0 * DIM))


def test_refuses_what_it_cannot_read() -> None:
    cache, table = Keys([4], 16, OCP, seed=19).on(torch.device("cpu"))
    q, weights = torch.zeros(2, 3, DIM), torch.zeros(2, 3)
    rows = (torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ShapeError, match="encoding of the keys"):
        triton_logits.indexer_logits(q.to(torch.float8_e4m3fnuz), weights, cache, table, *rows)
    with pytest.raises(ShapeError, match="head weights: expected fp32"):
        triton_logits.indexer_logits(q, weights.double(), cache, table, *rows)
    with pytest.raises(ShapeError, match="uint8 pages of 2112 bytes"):
        triton_logits.indexer_logits(q[..., :64], weights, cache, table, *rows)
    with pytest.raises(ShapeError, match="blocks of 16 entries"):
        triton_logits.indexer_logits(q, weights, cache, BlockTable(table.blocks, table.first_block, 8), *rows)
    tokens = PagedCache(torch.zeros(1, 584 * 16, dtype=torch.uint8), 16, CacheFormat.FP8_DS_MLA, OCP)
    with pytest.raises(UnsupportedError, match="cannot be stored as fp8_ds_mla"):
        triton_logits.indexer_logits(q, weights, tokens, table, *rows)
