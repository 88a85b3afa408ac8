"""What each row of a step is and where it writes, against loops over requests and their rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from dsv4dist.errors import ShapeError
from dsv4dist.kernels.block_table import BlockTable
from dsv4dist.kernels.step_rows import CompressedTables, StepRows
from dsv4dist.kernels.visibility import completes_entry, visible_entries
from tests.kernels.implementations import Implementation, implementations
from tests.support.pages import random_table, slot_of
from tests.support.poison import poisoned, uninitialised_memory_poisoned

STEP_ROWS = implementations("step_rows.step_rows")
CPU = torch.device("cpu")
EDGES = [0, 1, 3, 4, 5, 127, 128, 129, 255, 256, 257, 2048]
KINDS = ((4, 64, 4), (128, 2, 8))
"""Ratio, entries per block and states per block of CSA and HCA."""


@dataclass
class Step:
    """Requests with `new[i]` rows that end sequences of `lens[i]` tokens, and `padding` rows behind them."""

    new: list[int]
    lens: list[int]
    padding: int
    window: BlockTable
    compressed: list[CompressedTables]

    @staticmethod
    def of(new: list[int], lens: list[int], padding: int = 0, first: int = 0, seed: int = 0) -> Step:
        source = torch.Generator().manual_seed(seed)

        def table(per_token: int, block_size: int, first: int) -> BlockTable:
            return random_table([length // per_token for length in lens], block_size, source, CPU, first)[0]

        compressed = [CompressedTables(ratio, table(ratio, size, 0), table(1, states, 5 * first))
                      for ratio, size, states in KINDS]  # fmt: skip
        return Step(new, lens, padding, table(1, 64, first), compressed)

    @property
    def tables(self) -> list[BlockTable]:
        return [self.window, *(table for one in self.compressed for table in (one.entries, one.states))]

    @property
    def token_ids(self) -> list[int]:
        return [7 * row + 3 for row in range(sum(self.new) + self.padding)]

    def run(self, impl: Implementation, dtype: torch.dtype = torch.int32) -> StepRows:
        def integers(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=impl.device)

        def there(table: BlockTable) -> BlockTable:
            return BlockTable(table.blocks.to(impl.device), table.first_block.to(impl.device), table.block_size)

        starts = [sum(self.new[:req]) for req in range(len(self.new) + 1)]
        tables = [replace(one, entries=there(one.entries), states=there(one.states)) for one in self.compressed]
        with uninitialised_memory_poisoned():
            rows: StepRows = impl.op(
                integers(self.token_ids), integers(starts), integers(self.lens), there(self.window), tables
            )
        return rows


def check(step: Step, got: StepRows) -> None:
    """Every array, from one loop over requests and one over their rows."""
    owner = [(req, length - count + i) for req, (count, length) in enumerate(zip(step.new, step.lens, strict=True))
             for i in range(count)]  # fmt: skip
    padding = [-1] * step.padding

    def by_row(table: BlockTable) -> list[int]:
        return [slot_of(table, req, position) for req, position in owner] + padding

    expected = {
        "token_ids": step.token_ids,
        "token_to_req": [req for req, _ in owner] + [len(step.new) - 1] * step.padding,
        "positions": [position for _, position in owner] + padding,
        "rotary_positions": [position for _, position in owner] + [0] * step.padding,
        "window_slots": by_row(step.window),
    }
    arrays = {name: getattr(got, name) for name in expected}
    assert len(got.compressed) == len(step.compressed)
    for tables, rows in zip(step.compressed, got.compressed, strict=True):
        entry_slots, visible_lens = [], []
        for req, position in owner:
            complete = len(range(tables.ratio - 1, position + 1, tables.ratio))  # entries whose last token is in sight
            ends_one = position in range(tables.ratio - 1, position + 1, tables.ratio)
            visible_lens.append(complete)
            entry_slots.append(slot_of(tables.entries, req, complete - 1) if ends_one else -1)
        kind = {"entry_slots": entry_slots + padding, "visible_lens": visible_lens + [0] * step.padding,
                "state_slots": by_row(tables.states)}  # fmt: skip
        expected |= {f"{name} of {tables.ratio}": values for name, values in kind.items()}
        arrays |= {f"{name} of {tables.ratio}": getattr(rows, name) for name in kind}
    for name, values in expected.items():
        assert arrays[name].dtype == torch.int64, name
        assert arrays[name].is_contiguous(), name
        assert arrays[name].tolist() == values, name


@pytest.mark.parametrize("impl", STEP_ROWS)
@pytest.mark.parametrize("length", EDGES)
def test_the_last_rows_of_one_sequence(impl: Implementation, length: int) -> None:
    for new, padding in ((0, 1), (1, 0), (1, 6), (3, 1), (40, 0)):
        step = Step.of([min(new, length)], [length], padding)
        check(step, step.run(impl))


@pytest.mark.parametrize("impl", STEP_ROWS)
@pytest.mark.parametrize("length", [260, pytest.param(2048, marks=pytest.mark.slow)])
def test_a_whole_prompt(impl: Implementation, length: int) -> None:
    step = Step.of([length], [length], padding=1)
    check(step, step.run(impl))


@pytest.mark.parametrize("impl", STEP_ROWS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_requests_of_any_number_of_rows(impl: Implementation, dtype: torch.dtype) -> None:
    new = [0, 1, 3, 0, 0, 2, 128, 1, 0, 40, 0]
    lens = [0, 1, 3, 9, 0, 4, 129, 2048, 500, 300, 0]
    step = Step.of(new, lens, padding=9, first=2)
    check(step, step.run(impl, dtype))


@pytest.mark.parametrize("impl", STEP_ROWS)
def test_missing_blocks(impl: Implementation) -> None:
    step = Step.of([150, 1, 3], [400, 128, 129], padding=3, first=1)
    for seed, table in enumerate(step.tables):
        table.blocks[torch.rand(table.blocks.shape, generator=torch.Generator().manual_seed(seed)) < 0.5] = -1
    check(step, step.run(impl))


@pytest.mark.parametrize("impl", STEP_ROWS)
@pytest.mark.parametrize("width", [0, 1])
def test_narrow_tables(impl: Implementation, width: int) -> None:
    step = Step.of([3, 1, 5], [4, 128, 300], padding=2)
    for table in step.tables:
        object.__setattr__(table, "blocks", table.blocks[:, :width])
    check(step, step.run(impl))


@pytest.mark.parametrize("impl", STEP_ROWS)
def test_slots_beyond_int32(impl: Implementation) -> None:
    step = Step.of([1, 2], [128, 4])
    for table in step.tables:
        table.blocks.add_(2**31 - 1000)
    check(step, step.run(impl))


@pytest.mark.parametrize("impl", STEP_ROWS)
@pytest.mark.parametrize("count", [31, 32, 33, 255, 256, 257, 300])
def test_many_requests(impl: Implementation, count: int) -> None:
    lens = [EDGES[req % len(EDGES)] for req in range(count)]
    step = Step.of([min(length, 1 + req % 2) for req, length in enumerate(lens)], lens, padding=5, seed=count)
    check(step, step.run(impl))


@pytest.mark.parametrize("impl", STEP_ROWS)
def test_no_requests_and_no_rows(impl: Implementation) -> None:
    for step in (Step.of([], []), Step.of([0, 0], [0, 200]), Step.of([0, 0], [0, 0], padding=3)):
        check(step, step.run(impl))


@pytest.mark.parametrize("impl", STEP_ROWS)
@pytest.mark.parametrize("count", [0, 1, 2])
def test_kinds_that_the_model_has(impl: Implementation, count: int) -> None:
    step = Step.of([2, 1], [130, 128], padding=1)
    for kinds in (step.compressed[:count], step.compressed[2 - count :]):
        one = replace(step, compressed=kinds)
        check(one, one.run(impl))


@pytest.mark.parametrize("impl", STEP_ROWS)
def test_visibility_is_that_of_its_one_formula(impl: Implementation) -> None:
    step = Step.of([520], [520])
    got, positions = step.run(impl), torch.arange(520)
    for (ratio, _, _), rows in zip(KINDS, got.compressed, strict=True):
        assert rows.visible_lens.tolist() == visible_entries(positions, ratio).tolist()
        assert (rows.entry_slots >= 0).tolist() == completes_entry(positions, ratio).tolist()


@pytest.mark.parametrize("impl", STEP_ROWS)
def test_sections_of_a_packet(impl: Implementation) -> None:
    """Inputs are views of one buffer at any word, with columns and rows that nobody may read around them."""
    step = Step.of([1, 0, 4], [129, 7, 128], padding=3)
    for table in step.tables:
        around = poisoned(table.blocks.shape[0] + 1, table.blocks.shape[1] + 3, dtype=torch.int32)
        inside = around[:-1, 1:-2]
        inside.copy_(table.blocks)
        object.__setattr__(table, "blocks", inside)
    check(step, step.run(impl))


@pytest.mark.gpu
@pytest.mark.parametrize("impl", STEP_ROWS[2:3])
def test_replayed_steps_read_the_lengths_they_find(impl: Implementation) -> None:
    """A captured launch serves every step of its sizes: nothing of the first one stays in it."""
    step, device = Step.of([1, 2, 0], [128, 4, 0], padding=1), impl.device
    check(step, step.run(impl))  # compiled before capture
    other = Step.of([2, 0, 1], [300, 9, 1], padding=1)
    widths = [max(a.blocks.shape[1], b.blocks.shape[1]) for a, b in zip(step.tables, other.tables, strict=True)]
    for one in (step, other):
        for table, width in zip(one.tables, widths, strict=True):
            wider = torch.nn.functional.pad(table.blocks, (0, width - table.blocks.shape[1]), value=-1)
            object.__setattr__(table, "blocks", wider)

    def inputs(one: Step) -> list[torch.Tensor]:
        starts = [sum(one.new[:req]) for req in range(4)]
        lists = [torch.tensor(values, dtype=torch.int32) for values in (one.token_ids, starts, one.lens)]
        return lists + [part for table in one.tables for part in (table.blocks, table.first_block)]

    held = [one.to(device) for one in inputs(step)]
    tables = [BlockTable(*held[3 + 2 * i : 5 + 2 * i], table.block_size) for i, table in enumerate(step.tables)]
    kinds = [CompressedTables(one.ratio, *tables[1 + 2 * i : 3 + 2 * i]) for i, one in enumerate(step.compressed)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows = impl.op(*held[:3], tables[0], kinds)
    for one in (step, other, step):
        for target, values in zip(held, inputs(one), strict=True):
            target.copy_(values)
        graph.replay()
        check(one, rows)


@pytest.mark.parametrize("impl", STEP_ROWS[1:])
def test_wrong_input_is_refused(impl: Implementation) -> None:
    def integers(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=impl.device)

    def table(requests: int) -> BlockTable:
        return BlockTable(integers(*[0] * requests).view(requests, 1), integers(*[0] * requests), 64)

    kind = CompressedTables(4, table(1), table(1))
    with pytest.raises(ShapeError, match="query_start_loc"):
        impl.op(integers(5), integers(0, 1, 1), integers(1), table(1))
    with pytest.raises(ShapeError, match="token_ids"):
        impl.op(integers(5).half(), integers(0, 1), integers(1), table(1))
    with pytest.raises(ShapeError, match="window blocks: expected 1 requests"):
        impl.op(integers(5), integers(0, 1), integers(1), table(2))
    with pytest.raises(ShapeError, match="ratio 4 states"):
        impl.op(integers(5), integers(0, 1), integers(1), table(1), [replace(kind, states=table(2))])
    with pytest.raises(ShapeError, match="at most 2 kinds"):
        impl.op(integers(5), integers(0, 1), integers(1), table(1), [kind] * 3)
    with pytest.raises(ShapeError, match="there are no requests"):
        impl.op(integers(5), integers(0), integers(), table(0))
