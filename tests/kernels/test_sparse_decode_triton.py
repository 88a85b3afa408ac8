"""Sparse decode attention in Triton against float64 loops: on a GPU if there is one, else on the CPU."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4dist.arch import arch_of, traits_by_name
from dsv4dist.errors import UnsupportedError
from dsv4dist.kernels.paged_cache import CacheFormat, Fp8Format, PagedCache
from dsv4dist.kernels.segments import Segment
from tests.kernels import emulation
from tests.kernels.implementations import Implementation, implementations
from tests.support.poison import uninitialised_memory_poisoned

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OCP, FNUZ = Fp8Format.OCP, Fp8Format.FNUZ
SCALE = 512**-0.5
SPARSE_ATTENTION = implementations("sparse_attention.sparse_attention", triton="sparse_decode")[1:]
current: Implementation


@pytest.fixture(scope="module", autouse=True, params=SPARSE_ATTENTION)
def _implementation(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test here runs once for each implementation, which `run` and `check` know as `current`."""
    global current
    current = request.param
    yield
    del current


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---- Caches, written byte by byte from the format's definition -------------------------------------------------------


def fp8_values(fp8_format: Fp8Format) -> torch.Tensor:
    """float64 value of every byte, from sign, exponent and mantissa (spec 2.1)."""
    bias = 7 if fp8_format is OCP else 8
    values = []
    for byte in range(256):
        exponent, mantissa = byte >> 3 & 15, byte & 7
        size = math.ldexp(mantissa / 8, 1 - bias) if exponent == 0 else math.ldexp(1 + mantissa / 8, exponent - bias)
        nan = (byte & 0x7F) == 0x7F if fp8_format is OCP else byte == 0x80
        values.append(math.nan if nan else -size if byte & 0x80 else size)
    return torch.tensor(values, dtype=torch.float64)


class Pages:
    """An fp8_ds_mla cache full of 0xFF, and the float64 keys that were stored in it."""

    def __init__(self, num_blocks: int, block_size: int, fp8_format: Fp8Format, stride: int | None = None) -> None:
        content = block_size * 584
        stride = stride or -(-content // 576) * 576 + 576
        memory = torch.full((num_blocks * stride,), 0xFF, dtype=torch.uint8)
        self.data = memory.as_strided((num_blocks, content), (stride, 1))
        self.block_size, self.fp8_format = block_size, fp8_format
        self.keys: dict[int, torch.Tensor] = {}

    def store(self, slot: int, data: torch.Tensor, scale: torch.Tensor, rope: torch.Tensor) -> None:
        block, at = divmod(slot, self.block_size)
        page = self.data[block]
        page[at * 576 : at * 576 + 448] = data
        page[at * 576 + 448 : at * 576 + 576] = rope.bfloat16().view(torch.uint8)
        start = self.block_size * 576 + at * 8
        page[start : start + 7], page[start + 7] = scale, 0
        power = torch.exp2(scale.double() - 127).masked_fill(scale == 255, math.nan)
        nope = fp8_values(self.fp8_format)[data.long()] * power.repeat_interleave(64)
        self.keys[slot] = torch.cat([nope, rope.bfloat16().double()]).nan_to_num(nan=0.0)

    def store_random(self, slots: range | list[int], seed: int) -> None:
        rng = generator(seed)
        for slot in slots:
            data = torch.randint(0, 256, (448,), generator=rng, dtype=torch.uint8)
            data = torch.where(torch.isin(data, torch.tensor([0x7F, 0xFF, 0x80])), 0x31, data).to(torch.uint8)
            scale = torch.randint(117, 121, (7,), generator=rng, dtype=torch.uint8)
            self.store(slot, data, scale, torch.randn(64, generator=rng))

    def cache(self) -> PagedCache:
        return PagedCache(self.data.to(DEVICE), self.block_size, CacheFormat.FP8_DS_MLA, self.fp8_format)

    @property
    def num_slots(self) -> int:
        return self.data.shape[0] * self.block_size


def segment(cache: PagedCache, lists: list[list[int]]) -> Segment:
    ends = torch.tensor([0, *(len(one) for one in lists)]).cumsum(0).int()
    flat = torch.tensor([slot for one in lists for slot in one] + [2**31 - 1] * 3, dtype=torch.int32)
    return Segment(cache, flat.to(DEVICE), ends.to(DEVICE))


def attend(
    q: torch.Tensor, keys: list[list[torch.Tensor]], sink: torch.Tensor | None, scale: float = SCALE
) -> torch.Tensor:
    """The definition, one query and one head at a time, in float64."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    for i, row in enumerate(keys):
        if not row:
            continue
        k = torch.stack(row)
        for head in range(q.shape[1]):
            scores = (k @ q[i, head].double()) * scale
            extra = [] if sink is None else [sink[head].double()]
            top = max([scores.max(), *extra])
            weights = torch.exp(scores - top)
            out[i, head] = weights @ k / (weights.sum() + sum(torch.exp(one - top) for one in extra))
    return out


def stored(pages: Pages, slots: list[int]) -> list[torch.Tensor]:
    return [pages.keys[slot] for slot in slots if 0 <= slot < pages.num_slots]


def run(q: torch.Tensor, main: Segment, extra: Segment | None = None, **options: object) -> torch.Tensor:
    """The operation on poisoned scratch memory; tensors moved to the device, the result back as float64."""
    moved = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    sink = moved.pop("sink", None)
    with uninitialised_memory_poisoned():
        result = current.op(q.to(DEVICE), main, extra, sink, SCALE, **moved)
    return result.cpu().double()


def native() -> Fp8Format:
    """The encoding that the device under test converts in hardware, whose caches may have a kernel of their own."""
    arch = arch_of(torch.device(DEVICE)) if current.arch is None else traits_by_name(current.arch)
    return arch.fp8_format


def in_fp32() -> bool:
    """Whether products are exact to fp32, as in the interpreter; GPUs round one factor to fp16 or bf16."""
    return current.name == "triton-interpret"


def check(got: torch.Tensor, want: torch.Tensor, tolerance: float | None = None) -> None:
    tolerance = (2e-5 if in_fp32() else 2e-2) if tolerance is None else tolerance
    assert torch.isfinite(got).all()
    worst = ((got - want).abs() / (1 + want.abs())).max().item() if want.numel() else 0.0
    assert worst <= tolerance, f"worst error {worst}"


# ---- Lengths, splits, absent keys ------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_splits", [1, 2, 8, 32, None])
def test_ragged_lengths_absent_slots_and_any_split_count(num_splits: int | None) -> None:
    main, extra = Pages(4, 64, native()), Pages(70, 2, native())
    main.store_random(range(1, 256), 1)
    extra.store_random(range(1, 140), 2)
    rng = generator(3)
    lists = [torch.randperm(255, generator=rng)[:n].add(1).tolist() for n in (0, 1, 127, 128, 129)]
    lists[3][5:9] = [-1, 256, 2**31 - 1, -(2**31)]
    others = [torch.randperm(139, generator=rng)[:n].add(1).tolist() for n in (0, 0, 5, 130, 64)]
    others[4][:60] = [-1] * 60
    q = torch.randn(5, 3, 512, generator=rng).bfloat16().float()
    sink = torch.randn(4, generator=rng)
    got = run(q, segment(main.cache(), lists), segment(extra.cache(), others), sink=sink, num_splits=num_splits)
    keys = [stored(main, a) + stored(extra, b) for a, b in zip(lists, others, strict=True)]
    check(got, attend(q, keys, sink))
    assert (got[0] == 0).all()


def test_absent_keys_never_read_slot_zero() -> None:
    main, extra = Pages(2, 64, native()), Pages(2, 64, native())
    main.store_random([3, 70, 99], 4)
    q = torch.randn(2, 2, 512, generator=generator(5))
    lists = [[3] + [-1] * 40 + [70, 99] + [-1] * 21, [128] * 61 + [3, 70, 99]]
    nothing = segment(extra.cache(), [[-1] * 70, [128] * 3])
    got = run(q, segment(main.cache(), lists), nothing)
    check(got, attend(q, [stored(main, one) for one in lists], None))


@pytest.mark.parametrize("num_splits", [1, 3])
def test_whole_tiles_of_absent_keys_before_between_and_behind(num_splits: int) -> None:
    main, extra = Pages(2, 64, native()), Pages(2, 32, native())
    main.store_random([3, 70, 99], 23)
    extra.store_random([5, 40], 24)
    hole = [-1, 128, 2**31 - 1] * 50
    lists = [[*hole, 3, *hole, 70, 99, *hole], hole, []]
    others = [[*hole, 40, *hole], [*hole, 5], [*hole, 40, 5]]
    q = torch.randn(3, 2, 512, generator=generator(25))
    got = run(q, segment(main.cache(), lists), segment(extra.cache(), others), num_splits=num_splits)
    check(got, attend(q, [stored(main, a) + stored(extra, b) for a, b in zip(lists, others, strict=True)], None))


def test_pages_of_a_size_that_is_no_power_of_two() -> None:
    pages = Pages(3, 48, native())
    pages.store_random(range(144), 26)
    lists = [list(range(20, 144, 3)), [-1, 47, 48, 144]]
    q = torch.randn(2, 2, 512, generator=generator(27))
    check(run(q, segment(pages.cache(), lists)), attend(q, [stored(pages, one) for one in lists], None))


def test_a_row_of_absent_keys_is_exactly_zero() -> None:
    main = Pages(1, 64, native())
    for sink in (None, torch.tensor([0.0, 80.0]), torch.tensor([-math.inf, -math.inf])):
        for num_splits in (1, 4):
            got = run(torch.randn(2, 2, 512), segment(main.cache(), [[], [-1] * 40]), sink=sink, num_splits=num_splits)
            assert (got == 0).all()


# ---- Encodings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fp8_format", [OCP, FNUZ])
@pytest.mark.parametrize("num_splits", [1, 2])
def test_every_byte_of_a_single_key_comes_back_exactly(fp8_format: Fp8Format, num_splits: int) -> None:
    pages = Pages(1, 4, fp8_format)
    every = torch.arange(448).remainder(256).to(torch.uint8)
    scale = torch.tensor([105, 112, 119, 120, 127, 128, 134], dtype=torch.uint8)
    rope = torch.linspace(-9, 9, 64)
    pages.store(0, every, scale, rope)
    rope[7] = math.nan
    pages.store(1, every.roll(100), scale.flip(0), rope)
    finite = torch.where(torch.isin(every, torch.tensor([0x7F, 0xFF, 0x80])), 0, every).to(torch.uint8)
    pages.store(2, finite, scale, torch.linspace(-1, 1, 64))
    got = run(torch.zeros(3, 1, 512), segment(pages.cache(), [[0], [1], [2]]), num_splits=num_splits)
    want = torch.stack([pages.keys[slot] for slot in range(3)]).unsqueeze(1)
    check(got, want, 0 if in_fp32() else 2**-8)


def test_scale_bytes_at_the_ends_of_their_range() -> None:
    pages = Pages(1, 4, native())
    data = torch.full((448,), 0x38, dtype=torch.uint8)
    pages.store(0, data, torch.tensor([255, 1, 0, 60, 100, 140, 180], dtype=torch.uint8), torch.ones(64))
    got = run(torch.zeros(1, 2, 512), segment(pages.cache(), [[0]]))
    want = pages.keys[0].expand(1, 2, 512)
    torch.testing.assert_close(got, want, rtol=2**-8, atol=1e-30)


@pytest.mark.parametrize(("a", "b"), [(FNUZ, OCP), (OCP, FNUZ), (FNUZ, FNUZ)])
def test_each_cache_is_read_in_its_own_encoding(a: Fp8Format, b: Fp8Format) -> None:
    main, extra = Pages(1, 64, a), Pages(1, 64, b)
    main.store_random(range(64), 6)
    extra.store_random(range(64), 7)
    q = torch.randn(1, 2, 512, generator=generator(8))
    slots = list(range(40))
    got = run(q, segment(main.cache(), [slots]), segment(extra.cache(), [slots]))
    check(got, attend(q, [stored(main, slots) + stored(extra, slots)], None))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_plain_rows_alone_and_beside_an_fp8_cache(dtype: torch.dtype) -> None:
    rng = generator(9)
    data = torch.randn(5, 16, 512, generator=rng).to(dtype)
    data[0] = math.nan
    data[1, 3, 40] = math.nan
    rows = PagedCache(data[::2].to(DEVICE), 16) if DEVICE == "cpu" else PagedCache(data.to(DEVICE)[::2], 16)
    flat = data[::2].reshape(-1, 512).double().nan_to_num(nan=0.0)
    fp8 = Pages(1, 64, native())
    fp8.store_random(range(64), 10)
    q = torch.randn(2, 2, 512, generator=rng)
    lists = [list(range(16, 48)), [17, 48, -1]]
    other = [list(range(20)), []]
    keys = [[flat[slot] for slot in one if 0 <= slot < 48] for one in lists]
    check(run(q, segment(rows, lists)), attend(q, keys, None))
    got = run(q, segment(rows, lists), segment(fp8.cache(), other))
    check(got, attend(q, [a + stored(fp8, b) for a, b in zip(keys, other, strict=True)], None))


# ---- Heads, sinks, rotation, strides ---------------------------------------------------------------------------------


@pytest.mark.parametrize("num_heads", [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128])
def test_any_number_of_local_heads(num_heads: int) -> None:
    pages = Pages(1, 64, native())
    pages.store_random(range(20), 11)
    q = torch.randn(1, num_heads, 512, generator=generator(num_heads)).bfloat16().float()
    sink = torch.randn(num_heads, generator=generator(1))
    slots = list(range(17))
    got = run(q, segment(pages.cache(), [slots]), sink=sink)
    check(got, attend(q, [stored(pages, slots)], sink))


@pytest.mark.parametrize("sink", [[-math.inf, 0.0], [80.0, -80.0], [5.0, -math.inf]])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_sinks_join_the_denominator_only(sink: list[float], num_splits: int) -> None:
    pages = Pages(2, 64, native())
    pages.store_random(range(128), 12)
    q = 6 * torch.randn(2, 2, 512, generator=generator(13)).bfloat16().float()
    lists = [list(range(100)), [5]]
    got = run(q, segment(pages.cache(), lists), sink=torch.tensor(sink), num_splits=num_splits)
    check(got, attend(q, [stored(pages, one) for one in lists], torch.tensor(sink)))


@pytest.mark.parametrize("num_splits", [1, 4])
def test_the_result_is_rotated_back_by_the_position_of_the_query(num_splits: int) -> None:
    pages = Pages(2, 64, native())
    pages.store_random(range(128), 14)
    rng = generator(15)
    q = torch.randn(3, 2, 512, generator=rng)
    lists = [list(range(100)), [], [7, 8]]
    angle = torch.rand(50, 32, generator=rng) * 6
    positions = torch.tensor([49, 3, 0])
    table = torch.cat([angle.cos(), angle.sin()], dim=1)
    got = run(q, segment(pages.cache(), lists), positions=positions, cos_sin=table, num_splits=num_splits)
    want = attend(q, [stored(pages, one) for one in lists], None)
    turn = torch.polar(torch.ones(3, 32, dtype=torch.float64), -angle[positions].double())
    pairs = torch.view_as_complex(want[..., 448:].reshape(3, 2, 32, 2).contiguous())
    want[..., 448:] = torch.view_as_real(pairs * turn.unsqueeze(1)).flatten(-2)
    check(got, want)


def test_strided_query_and_output_leave_the_rest_untouched() -> None:
    pages = Pages(1, 64, native())
    pages.store_random(range(64), 16)
    q = torch.randn(3, 5, 640, generator=generator(17)).to(DEVICE)
    out = torch.full((3, 4, 520), 7.5, device=DEVICE)
    lists = [[1, 2, 3], [], [60]]
    got = run(q[:, 1:4, 64:576], segment(pages.cache(), lists), out=out[:, :3, :512])
    check(got, attend(q[:, 1:4, 64:576].cpu(), [stored(pages, one) for one in lists], None))
    assert (out[:, 3] == 7.5).all()
    assert (out[:, :, 512:] == 7.5).all()


def test_a_garbage_query_does_not_touch_its_neighbours() -> None:
    pages = Pages(2, 64, native())
    pages.store_random(range(128), 18)
    q = torch.randn(3, 2, 512, generator=generator(19))
    q[1] = math.nan
    lists = [list(range(64)), [3, 100, 5000], list(range(64, 128))]
    with uninitialised_memory_poisoned():
        got = current.op(q.to(DEVICE), segment(pages.cache(), lists), None, None, SCALE).cpu().double()
    want = attend(q, [stored(pages, one) for one in lists], None)
    check(got[[0, 2]], want[[0, 2]])


@pytest.mark.parametrize("stride", [37_440 * 29_000, 37_440 * 58_000])
def test_pages_beyond_two_and_four_gigabytes(stride: int) -> None:
    content = 64 * 584
    memory = torch.empty(4 * stride + content, dtype=torch.uint8)  # address space only: few of its pages are touched
    far = Pages(1, 64, native())
    far.store_random(range(64), 20)
    near = far.data[0].clone()
    data = memory.as_strided((5, content), (stride, 1))
    data[4] = near
    cache = PagedCache(data.to(DEVICE) if DEVICE == "cpu" else _copied(data), 64, CacheFormat.FP8_DS_MLA, native())
    q = torch.randn(1, 1, 512, generator=generator(21))
    got = run(q, segment(cache, [[256 + slot for slot in (0, 9, 63)]]))
    check(got, attend(q, [stored(far, [0, 9, 63])], None))


def _copied(data: torch.Tensor) -> torch.Tensor:
    memory = torch.empty(4 * data.stride(0) + data.shape[1], dtype=torch.uint8, device=DEVICE)
    moved = memory.as_strided(data.shape, data.stride())
    moved[4] = data[4].to(DEVICE)
    return moved


# Emulated kernels are compiled, and every new variant takes long: few of them, and the same ones in every run.
@settings(max_examples=3 if emulation.ARCHS else 5, deadline=None, derandomize=bool(emulation.ARCHS))
@given(st.data())
def test_random_rows_and_splits(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.tuples(st.integers(0, 70), st.integers(0, 70)), min_size=1, max_size=3))
    num_splits = data.draw(st.integers(1, 32))
    formats = data.draw(st.tuples(st.sampled_from([OCP, FNUZ]), st.sampled_from([OCP, FNUZ])))
    main, extra = Pages(1, 64, formats[0]), Pages(32, 2, formats[1])
    main.store_random(range(64), data.draw(st.integers(0, 99)))
    extra.store_random(range(64), data.draw(st.integers(0, 99)))
    slot = st.integers(-3, 66)
    lists = [[data.draw(st.lists(slot, min_size=n, max_size=n)) for n in pair] for pair in lengths]
    q = torch.randn(len(lists), 2, 512, generator=generator(22))
    sink = torch.tensor([0.3, -1.0]) if data.draw(st.booleans()) else None
    a, b = [one[0] for one in lists], [one[1] for one in lists]
    got = run(q, segment(main.cache(), a), segment(extra.cache(), b), sink=sink, num_splits=num_splits)
    check(got, attend(q, [stored(main, x) + stored(extra, y) for x, y in zip(a, b, strict=True)], sink))


def test_wrong_input_is_named_all_at_once() -> None:
    pages = Pages(1, 64, native())
    good = segment(pages.cache(), [[1]])
    cache = PagedCache(pages.data.to(DEVICE), 65, CacheFormat.FP8_DS_MLA, native())
    bad = Segment(cache, good.indices.long(), good.indptr)
    with pytest.raises(UnsupportedError) as caught:
        run(torch.zeros(2, 1, 512), bad, good, sink=torch.zeros(0), positions=torch.zeros(2))
    message = str(caught.value)
    for part in (
        "main pages",
        "main indices",
        "indptr must have 3",
        "sink",
        "given together",
        "positions must be int64",
    ):
        assert part in message
    assert "\n" not in message
    with pytest.raises(UnsupportedError, match="q must be"):
        run(torch.zeros(1, 1, 256), good)


def test_no_queries_and_no_heads() -> None:
    cache = Pages(1, 64, native()).cache()
    assert run(torch.zeros(0, 4, 512), segment(cache, [])).shape == (0, 4, 512)
    assert run(torch.zeros(1, 0, 512), segment(cache, [[1]])).shape == (1, 0, 512)
