"""Few rows times fp8 weights on Hopper against float64: shares of the channels, several streams, captured graphs."""

from __future__ import annotations

import pytest
import torch

from tests.support.poison import uninitialised_memory_poisoned

from dsv4dist.kernels._triton import hopper_linear  # isort: skip

pytestmark = pytest.mark.gpu

Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def _on_hopper() -> None:
    if torch.version.hip is not None or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")


def operands(rows: int, groups: int, columns: int, channels: int, dtype: torch.dtype, seed: int = 0) -> Operands:
    """x as part of wider rows, a weight, and scales that differ from block to block."""
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = (rows, groups, channels + 64)
    x = torch.randn(shape, generator=generator, device="cuda").to(dtype)[..., :channels]
    weight = torch.randn(groups, columns, channels, generator=generator, device="cuda").to(torch.float8_e4m3fn)
    scale = torch.rand(groups, -(-columns // 128), channels // 128, generator=generator, device="cuda") + 0.5
    return x, weight, scale


def expected(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float64 products, block scales applied to the weight."""
    spread = scale.double().repeat_interleave(128, 1)[:, : weight.shape[1]].repeat_interleave(128, 2)
    return torch.einsum("tgi,goi->tgo", x.double(), weight.double() * spread)


def product(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, splits: int | None = None) -> torch.Tensor:
    out = torch.empty(len(x), *weight.shape[:2], dtype=x.dtype, device="cuda")
    units = torch.cuda.get_device_properties("cuda").multi_processor_count
    hopper_linear.hopper_linear(x, weight, scale, out, units, splits)
    return out


def error(found: torch.Tensor, want: torch.Tensor) -> float:
    return float((found.double() - want).norm() / want.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 2, 8, 9, 16])
@pytest.mark.parametrize(("groups", "columns", "channels"), [(1, 256, 128), (2, 1100, 1408), (1, 4096, 1024)])
def test_values(rows: int, groups: int, columns: int, channels: int, dtype: torch.dtype) -> None:
    """Ragged columns, an odd number of blocks; the same bits twice; whole, in three shares, and as planned."""
    given = operands(rows, groups, columns, channels, dtype)
    assert hopper_linear.takes(*given)
    want = expected(*given)
    for splits in (1, 3, None):
        with uninitialised_memory_poisoned():
            found, again = product(*given, splits), product(*given, splits)
        assert error(found, want) < (4e-3 if dtype == torch.bfloat16 else 5e-4)
        assert torch.equal(found, again)


@pytest.mark.parametrize("columns", [1024, 4096])
def test_more_than_16_rows(columns: int) -> None:
    """Large weights are read in wider tiles."""
    given = operands(31, 1, columns, 4096, torch.bfloat16)
    assert hopper_linear.takes(*given)
    for splits in (1, 3, None):
        assert error(product(*given, splits), expected(*given)) < 4e-3


def test_streams_side_by_side() -> None:
    """Products in shares on several streams at once do not count each other's programs."""
    given = [operands(4, 1, 1024, 4096, torch.bfloat16, seed) for seed in range(4)]
    wanted = [expected(*one) for one in given]
    product(*given[0], 8)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in given]
    found: list[list[torch.Tensor]] = [[] for _ in given]
    for _ in range(20):
        for which, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[which].append(product(*given[which], 8))
    torch.cuda.synchronize()
    for results, want in zip(found, wanted, strict=True):
        assert all(error(one, want) < 4e-3 for one in results)


def test_captured() -> None:
    """Replays, also of two graphs in turn, leave the counters as they were."""
    first, second = (operands(3, 2, 512, 2048, torch.bfloat16, seed) for seed in (1, 2))
    product(*first, 4)
    torch.cuda.synchronize()
    graphs = []
    for given in (first, second):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = product(*given, 4)
        graphs.append((graph, out, expected(*given)))
    for _ in range(3):
        for graph, out, want in graphs:
            out.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            assert error(out, want) < 4e-3
