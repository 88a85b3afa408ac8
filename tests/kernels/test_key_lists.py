"""Ragged key lists and the combined lists of a gathered chunk, against loops over rows and columns."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4dist.errors import ShapeError
from dsv4dist.kernels.block_table import BlockTable
from tests.kernels.implementations import Implementation, implementations
from tests.support.pages import random_table, slot_of
from tests.support.poison import uninitialised_memory_poisoned

CPU = torch.device("cpu")
WINDOW = implementations("key_lists.window_key_list")
ENTRY = implementations("key_lists.entry_key_list")
VISIBLE = implementations("key_lists.visible_key_list")
COMPACT = implementations("combine_indices.compact_rows", triton="key_lists")
COMBINE = implementations("combine_indices.combine_indices")


def capacity(impl: Implementation, size: int) -> int | None:
    """The fixed size of a list whose launch reads no length; the reference makes lists as long as they are."""
    return None if impl.name == "reference" else size


def check(lists: tuple[torch.Tensor, torch.Tensor], rows: list[list[int]], capacity: int | None = None) -> None:
    indices, indptr = (one.cpu() for one in lists)
    ends = [0]
    for row in rows:
        ends.append(ends[-1] + len(row))
    assert (indices.dtype, indptr.dtype) == (torch.int32, torch.int32)
    assert indptr.tolist() == ends
    assert indices[: ends[-1]].tolist() == [slot for row in rows for slot in row]
    assert indices.numel() >= ends[-1] if capacity is None else indices.numel() == capacity


def step(count: int, block_size: int, per_token: int = 1, first: int = 0) -> tuple[BlockTable, list[int], list[int]]:
    """A block table of three requests with a hole, and `count` tokens of them."""
    source = torch.Generator().manual_seed(count)
    lens = [5, 70, 300]
    table, _ = random_table([-(-length // per_token) for length in lens], block_size, source, CPU, first)
    table.blocks[2, 1] = -1
    req = torch.randint(0, 3, (count,), generator=source).sort().values.tolist()
    return table, req, [int(torch.randint(0, lens[r], (1,), generator=source)) for r in req]


def on(impl: Implementation, table: BlockTable) -> BlockTable:
    return BlockTable(table.blocks.to(impl.device), table.first_block.to(impl.device), table.block_size)


def tensor(impl: Implementation, values: object, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=impl.device)


@pytest.mark.parametrize("impl", WINDOW)
@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 8, 9, 65])
@pytest.mark.parametrize(("window", "first"), [(128, 0), (32, 1), (5, 0)])
def test_window(impl: Implementation, count: int, window: int, first: int) -> None:
    table, req, positions = step(count, 16, first=first)
    with uninitialised_memory_poisoned():
        lists = impl.op(on(impl, table), tensor(impl, req), tensor(impl, positions), window)
    rows = [[slot_of(table, r, p - window + 1 + i) for i in range(window)] for r, p in zip(req, positions, strict=True)]
    rows = [[slot for slot in row if slot >= 0] for row in rows]
    check(lists, rows, None if impl.is_reference else count * window)


@pytest.mark.parametrize("impl", ENTRY)
@pytest.mark.parametrize("count", [0, 1, 4, 5, 8, 9, 65])
@pytest.mark.parametrize("width", [1, 63, 512])
def test_entries_keep_their_order(impl: Implementation, count: int, width: int) -> None:
    table, req, _ = step(count, 8, per_token=4)
    source = torch.Generator().manual_seed(width)
    entries = torch.randint(-20, 100, (count, width + 3), generator=source, dtype=torch.int32)
    with uninitialised_memory_poisoned():
        lists = impl.op(on(impl, table), tensor(impl, req), entries.to(impl.device)[:, :width])
    rows = [[slot_of(table, r, e) for e in row[:width]] for r, row in zip(req, entries.tolist(), strict=True)]
    check(lists, [[slot for slot in row if slot >= 0] for row in rows], None if impl.is_reference else count * width)


@pytest.mark.parametrize("impl", VISIBLE)
@pytest.mark.parametrize("count", [0, 1, 4, 5, 8, 9, 65])
@pytest.mark.parametrize("width", [3, 128])
def test_visible(impl: Implementation, count: int, width: int) -> None:
    table, req, positions = step(count, 2, per_token=4)
    lens = [(position + 1) // 4 for position in positions]
    with uninitialised_memory_poisoned():
        lists = impl.op(on(impl, table), tensor(impl, req), tensor(impl, lens), width)
    rows = [[slot_of(table, r, e) for e in range(min(n, width))] for r, n in zip(req, lens, strict=True)]
    check(lists, [[slot for slot in row if slot >= 0] for row in rows], capacity(impl, count * width))


@pytest.mark.parametrize("impl", VISIBLE)
def test_rows_longer_than_a_tile(impl: Implementation) -> None:
    table, _ = random_table([9000], 64, torch.Generator().manual_seed(0), CPU)
    table.blocks[0, 20] = -1
    lens = [2500, 0, 1024, 1025]
    lists = impl.op(on(impl, table), tensor(impl, [0] * 4), tensor(impl, lens), 3000)
    rows = [[slot_of(table, 0, e) for e in range(n)] for n in lens]
    check(lists, [[slot for slot in row if slot >= 0] for row in rows], capacity(impl, 4 * 3000))


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ENTRY[2:])
def test_thousands_of_rows(impl: Implementation) -> None:
    from dsv4dist.kernels.reference.key_lists import entry_key_list

    table, req, _ = step(8192, 8, per_token=4)
    entries = torch.randint(-20, 100, (8192, 512), dtype=torch.int32)
    expected = entry_key_list(table, torch.tensor(req), entries)
    indices, indptr = impl.op(on(impl, table), tensor(impl, req), entries.to(impl.device))
    assert torch.equal(indptr.cpu(), expected[1])
    assert torch.equal(indices.cpu()[: int(expected[1][-1])], expected[0])


@pytest.mark.parametrize("impl", COMPACT)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_compaction(impl: Implementation, data: st.DataObject) -> None:
    count, width = data.draw(st.integers(0, 12)), data.draw(st.integers(1, 40))
    dense = data.draw(
        st.lists(st.lists(st.integers(-3, 30), min_size=width, max_size=width), min_size=count, max_size=count)
    )
    lens = data.draw(st.lists(st.integers(0, width + 5), min_size=count, max_size=count))
    limit = data.draw(st.integers(0, 40))
    source = torch.tensor(dense, dtype=torch.int32).view(count, width).to(impl.device)
    lists = impl.op(source, tensor(impl, lens), limit)
    check(lists, [[v for v in row[:n] if 0 <= v < limit] for row, n in zip(dense, lens, strict=True)])


def combined(
    selected: list[list[int]] | None, req: list[int], positions: list[int], ratio: int, seq: list[int],
    gather: list[int], top_k: int, window: int, entries: int, rows: int, left: list[int], right: list[int], image: int,
) -> tuple[list[list[int]], list[int]]:  # fmt: skip
    """Spec 4.4, token by token."""
    out, lens = [], []
    width = -(-(top_k + window + image) // 128) * 128
    for t, (b, pos) in enumerate(zip(req, positions, strict=True)):
        ck = min((pos + 1) // ratio, top_k)
        row = [selected[t][i] if selected else i for i in range(ck)]
        row = [rows * b + e if 0 <= e < entries else -1 for e in row]
        first = seq[b] - gather[b]
        s0 = max(pos - (window - 1) - max(left[t] - (window - 1), 0), 0, first)
        sl = max(min(pos + right[t] + 1, seq[b]) - s0, 0)
        row += [rows * b + entries + s0 - first + i for i in range(min(sl, window + image))]
        out.append(row + [-1] * (width - len(row)))
        lens.append(ck + sl)
    return out, lens


@pytest.mark.parametrize("impl", COMBINE)
@pytest.mark.parametrize("kind", ["selected", "all", "window only", "images"])
def test_combination(impl: Implementation, kind: str) -> None:
    seq, new, window, ratio = [9, 40, 200], [9, 3, 70], 32, 4
    gather = [q + min(s - q, window - 1) for s, q in zip(seq, new, strict=True)]
    gather[2] -= 10  # the window of this request's first tokens begins before what was gathered
    req = [r for r, q in enumerate(new) for _ in range(q)]
    positions = [s - q + i for s, q in zip(seq, new, strict=True) for i in range(q)]
    source = torch.Generator().manual_seed(0)
    top_k, count = 0 if kind == "window only" else 20, len(req)
    selected = torch.randint(-1, 60, (count, 24), generator=source, dtype=torch.int32) if kind == "selected" else None
    image = 12 if kind == "images" else 0
    left = torch.randint(0, 50, (count,), generator=source).tolist() if image else [0] * count
    right = torch.randint(0, 12, (count,), generator=source).tolist() if image else [0] * count
    visible = [(p + 1) // ratio for p in positions]
    images = {"left_visible": tensor(impl, left), "right_visible": tensor(impl, right), "max_image": image}
    with uninitialised_memory_poisoned():
        indices, lens = impl.op(
            None if selected is None else selected.to(impl.device), tensor(impl, req), tensor(impl, positions),
            tensor(impl, visible), tensor(impl, seq), tensor(impl, gather), top_k, window, 50, 160,
            **(images if image else {}),
        )  # fmt: skip
    rows = None if selected is None else selected.tolist()
    expected = combined(rows, req, positions, ratio, seq, gather, top_k, window, 50, 160, left, right, image)
    assert indices.tolist() == expected[0]
    assert lens.tolist() == expected[1]


@pytest.mark.parametrize("impl", COMBINE)
def test_combination_of_nothing_and_of_half_a_pair(impl: Implementation) -> None:
    empty = tensor(impl, [])
    indices, lens = impl.op(None, empty, empty, empty, tensor(impl, [3]), tensor(impl, [3]), 4, 8, 1, 9)
    assert indices.shape == (0, 128)
    assert lens.shape == (0,)
    with pytest.raises(ShapeError, match="both or neither"):
        impl.op(None, empty, empty, empty, empty, empty, 4, 8, 1, 9, left_visible=empty)


@pytest.mark.parametrize("impl", ENTRY[1:])
def test_wrong_input_is_refused(impl: Implementation) -> None:
    table, req, _ = step(3, 8)
    with pytest.raises(ShapeError, match="entries"):
        impl.op(on(impl, table), tensor(impl, req), torch.zeros(3, 4, device=impl.device))
    with pytest.raises(ShapeError, match="token_to_req"):
        impl.op(on(impl, table), tensor(impl, req).short(), tensor(impl, [[0]] * 3))
