"""The compressor's states and entries against float64 loops over positions."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from dsv4dist.errors import ShapeError, UnsupportedError
from dsv4dist.kernels.block_table import BlockTable
from dsv4dist.kernels.paged_cache import CacheFormat, Fp8Format, PagedCache
from tests.kernels.implementations import Implementation, implementations
from tests.support.pages import (
    SENTINEL,
    fp8_cache,
    memory_of,
    padded_rows,
    quantisation_error,
    random_table,
    read_slot,
    rotated,
    slot_of,
)

EPS = 1e-6
STORE = implementations("compress.compress_store")
STATE = implementations("compress.compress_state")


@dataclass
class Case:
    """Requests whose every state is known; the last `new` tokens of each are this step's."""

    dim: int
    ratio: int
    overlap: int
    lens: list[int]
    new: list[int]
    device: torch.device

    def __post_init__(self) -> None:
        source = torch.Generator().manual_seed(sum(self.lens) + self.dim)
        size = 4 if self.ratio == 4 else 8
        width = self.overlap * self.dim
        self.kv = [torch.randn(length, width, generator=source) for length in self.lens]
        self.score = [torch.randn(length, width, generator=source) * 3 for length in self.lens]
        self.table, count = random_table(self.lens, size, source, torch.device("cpu"))
        self.state = padded_rows(count, size, 2 * width, torch.float32, self.device)
        self.weight = torch.randn(self.dim, generator=source)
        self.rotary = min(64, self.dim // 2)
        self.cos_sin = torch.randn(max([*self.lens, 1]), self.rotary, generator=source)
        self.req, self.positions = [], []
        for req, (length, new) in enumerate(zip(self.lens, self.new, strict=True)):
            self.req += [req] * new
            self.positions += list(range(length - new, length))
            for position in range(length):
                slot = slot_of(self.table, req, position)
                row = torch.cat((self.kv[req][position], self.score[req][position]))
                self.state.data[slot // size, slot % size] = row.to(self.device)
        self.state_slots = [slot_of(self.table, r, p) for r, p in zip(self.req, self.positions, strict=True)]
        # One request may complete several entries; their slots are this case's own numbering.
        done = [(p + 1) % self.ratio == 0 for p in self.positions]
        self.entry_slots = [3 + 2 * i if one else -1 for i, one in enumerate(done)]

    def run(self, impl: Implementation, cache: PagedCache) -> None:
        def integers(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64, device=self.device)

        table = BlockTable(
            self.table.blocks.to(self.device), self.table.first_block.to(self.device), self.table.block_size
        )
        impl.op(
            self.state, table, integers(self.req), integers(self.positions), integers(self.state_slots),
            self.weight.to(self.device), self.cos_sin.to(self.device), cache, integers(self.entry_slots), self.ratio,
            self.overlap, EPS,
        )  # fmt: skip

    def entry(self, token: int) -> torch.Tensor:
        """float64 entry that this step's `token` completes (spec 1.5)."""
        req, last, dim = self.req[token], self.positions[token], self.dim
        rows, scores = [], []
        for position in range(last - self.overlap * self.ratio + 1, last + 1):
            if position < 0:
                continue
            own = position > last - self.ratio
            side = slice(dim, 2 * dim) if self.overlap == 2 and own else slice(0, dim)
            rows.append(self.kv[req][position, side].double())
            scores.append(self.score[req][position, side].double())
        y = (torch.stack(scores).softmax(0) * torch.stack(rows)).sum(0)
        y = y / (y.square().mean() + EPS).sqrt() * self.weight.double()
        return rotated(y, self.cos_sin[last - self.ratio + 1])

    def entries(self) -> list[tuple[int, int]]:
        return [(token, slot) for token, slot in enumerate(self.entry_slots) if slot >= 0]


CASES = {
    "csa": (512, 4, 2, [3, 4, 9, 12], [3, 4, 5, 1]),
    "csa-index": (128, 4, 2, [8, 1, 63, 64], [8, 1, 5, 4]),
    "hca": (512, 128, 1, [127, 128, 129, 256], [1, 1, 2, 1]),
}


@pytest.mark.parametrize("impl", STORE)
@pytest.mark.parametrize("fp8_format", list(Fp8Format))
@pytest.mark.parametrize("name", CASES)
def test_fp8_entries(impl: Implementation, fp8_format: Fp8Format, name: str) -> None:
    case = Case(*CASES[name], device=impl.device)
    kind = CacheFormat.FP8_INDEX if case.dim == 128 else CacheFormat.FP8_DS_MLA
    size = 2 if case.ratio == 128 else 64
    cache = fp8_cache(-(-(4 + 2 * len(case.req)) // size), size, kind, fp8_format, impl.device)
    case.run(impl, cache)
    assert len(case.entries()) >= 2
    written = torch.zeros(memory_of(cache).numel(), dtype=torch.bool)
    for token, slot in case.entries():
        got, expected = read_slot(cache, slot, written), case.entry(token)
        if case.dim == 128:
            assert ((got - expected).abs() <= quantisation_error(expected, 128) + 1e-5).all()
        else:
            assert ((got - expected).abs()[:448] <= quantisation_error(expected[:448], 64) + 1e-5).all()
            torch.testing.assert_close(got[448:], expected[448:], rtol=2**-8 * 1.01, atol=1e-5)
    assert (memory_of(cache)[~written] == SENTINEL).all(), "bytes outside the written entries changed"


@pytest.mark.parametrize("impl", STORE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("dim", "ratio", "overlap"), [(32, 4, 2), (64, 128, 1)])
def test_rows(impl: Implementation, dtype: torch.dtype, dim: int, ratio: int, overlap: int) -> None:
    case = Case(dim, ratio, overlap, [ratio, 2 * ratio + 1, 3], [ratio, 3, 3], impl.device)
    cache = padded_rows(len(case.req) + 2, 2, dim, dtype, impl.device)
    case.run(impl, cache)
    rows = cache.data.cpu().double()
    for token, slot in case.entries():
        rtol = 2e-5 if dtype is torch.float32 else 2**-8 * 1.01
        torch.testing.assert_close(rows[slot // 2, slot % 2], case.entry(token), rtol=rtol, atol=1e-5)
    assert (~rows.isnan()).any(-1).sum() == len(case.entries())


@pytest.mark.parametrize("impl", STORE)
def test_absent_state_or_entry_slots_store_nothing(impl: Implementation) -> None:
    case = Case(32, 4, 2, [4, 8, 12], [1, 1, 1], impl.device)
    case.state_slots[0], case.entry_slots[1] = -1, 1000
    cache = padded_rows(8, 2, 32, torch.float32, impl.device)
    case.run(impl, cache)
    rows = cache.data.cpu()
    assert (~rows.isnan()).any(-1).nonzero().tolist() == [[case.entry_slots[2] // 2, case.entry_slots[2] % 2]]


@pytest.mark.parametrize("impl", STORE)
@pytest.mark.parametrize(("ratio", "overlap"), [(4, 2), (128, 1)])
def test_states_that_are_not_there_count_as_zeros(impl: Implementation, ratio: int, overlap: int) -> None:
    case = Case(64, ratio, overlap, [2 * ratio], [1], impl.device)
    gone = 1 if overlap == 2 else ratio + 8  # in the previous window, or early in the request's only one
    size = case.table.block_size
    case.table.blocks[0, gone // size] = -1
    first = gone // size * size
    case.kv[0][first : first + size], case.score[0][first : first + size] = 0.0, 0.0
    cache = padded_rows(3, 2, 64, torch.float32, impl.device)
    case.run(impl, cache)
    ((token, slot),) = case.entries()
    torch.testing.assert_close(cache.data.cpu().double()[slot // 2, slot % 2], case.entry(token), rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("impl", STORE[1:])
def test_arrivals_are_back_at_zero(impl: Implementation, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry in parts relies on it, and so does the next call."""
    counters = torch.zeros(8, dtype=torch.int32, device=impl.device)
    asked = []
    monkeypatch.setattr("dsv4dist.kernels._triton.compress.arrival_counters", lambda n, _: asked.append(n) or counters)
    case = Case(512, 128, 1, [128, 129], [1, 2], impl.device)
    cache = padded_rows(len(case.req) + 2, 2, 512, torch.float32, impl.device)
    case.run(impl, cache)
    assert asked == [3]
    assert not counters.any()
    assert (~cache.data.cpu().isnan()).any(-1).sum() == len(case.entries()) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("impl", STORE[2:])
def test_whoever_arrives_last_stores_the_same(impl: Implementation) -> None:
    case = Case(512, 128, 1, [128 * n for n in range(1, 9)], [1] * 8, impl.device)
    cache = padded_rows(len(case.req) * 2 + 2, 2, 512, torch.float32, impl.device)
    case.run(impl, cache)
    rows = cache.data.cpu().double()
    for token, slot in case.entries():
        torch.testing.assert_close(rows[slot // 2, slot % 2], case.entry(token), rtol=2e-5, atol=1e-5)
    first = cache.data.clone()
    for _ in range(300):
        cache.data.fill_(float("nan"))
        case.run(impl, cache)
        assert torch.equal(cache.data.nan_to_num(99.0), first.nan_to_num(99.0))


@pytest.mark.parametrize("impl", STORE)
def test_nothing_to_do(impl: Implementation) -> None:
    case = Case(32, 4, 2, [3], [0], impl.device)
    case.run(impl, padded_rows(2, 2, 32, torch.float32, impl.device))


@pytest.mark.gpu
@pytest.mark.parametrize("impl", STORE[2:])
@pytest.mark.parametrize("ratio", [4, 128])
def test_a_long_chunk(impl: Implementation, ratio: int) -> None:
    """Thousands of tokens: programs look through several of them."""
    case = Case(64, ratio, 2 if ratio == 4 else 1, [8192, 700], [4000, 500], impl.device)
    cache = padded_rows(len(case.req) + 2, 2, 64, torch.float32, impl.device)
    case.run(impl, cache)
    rows = cache.data.cpu().double()
    for token, slot in case.entries()[::17]:
        torch.testing.assert_close(rows[slot // 2, slot % 2], case.entry(token), rtol=2e-5, atol=1e-5)
    assert (~rows.isnan()).any(-1).sum() == len(case.entries())


@pytest.mark.parametrize("impl", STATE)
@pytest.mark.parametrize(("width", "ratio"), [(1024, 4), (24, 128)])
@pytest.mark.parametrize("count", [0, 1, 3, 65])
def test_states(impl: Implementation, width: int, ratio: int, count: int) -> None:
    source = torch.Generator().manual_seed(count)
    padded = torch.full((count, 2 * width + 8), float("nan"))
    padded[:, : 2 * width] = torch.randn(count, 2 * width, generator=source)
    ape = torch.randn(ratio, width, generator=source)
    positions = torch.randint(0, 300, (count,), generator=source)
    slots = torch.randperm(80, generator=source)[:count]
    if count > 2:
        slots[0], slots[1] = -1, 80
    state = padded_rows(20, 4, 2 * width, torch.float32, impl.device)
    kv_score = padded.to(impl.device)[:, : 2 * width]
    impl.op(kv_score, ape.to(impl.device), positions.to(impl.device), state, slots.to(impl.device))
    rows, present = state.data.cpu(), 0
    for token, slot in enumerate(slots.tolist()):
        if 0 <= slot < 80:
            expected = padded[token, : 2 * width].clone()
            expected[width:] += ape[positions[token] % ratio]
            assert torch.equal(rows[slot // 4, slot % 4], expected)
            present += 1
    assert (~rows.isnan()).any(-1).sum() == present


@pytest.mark.parametrize("impl", STORE[1:])
def test_wrong_input_is_refused(impl: Implementation) -> None:
    case = Case(32, 4, 2, [4], [4], impl.device)
    with pytest.raises(UnsupportedError, match="stores 512 channels, these entries have 32"):
        case.run(impl, fp8_cache(1, 64, CacheFormat.FP8_DS_MLA, Fp8Format.OCP, impl.device))
    case.overlap = 1
    with pytest.raises(ShapeError, match="state cache"):
        case.run(impl, padded_rows(2, 2, 32, torch.float32, impl.device))
