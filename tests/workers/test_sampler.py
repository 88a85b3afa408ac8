"""Sampling: the generator against known answers, the filters against plain loops, the distribution by counting."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dsv4dist.workers.executor import NO_TOKEN
from dsv4dist.workers.sampler import philox_uniform, sample, token_logprobs


def _philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 in Python integers."""
    for _ in range(10):
        low, high = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [(high >> 32) ^ counter[1] ^ key[0], high % 2**32, (low >> 32) ^ counter[3] ^ key[1], low % 2**32]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return counter


def test_philox_known_answer() -> None:
    """The authors' published vector for an all-zero counter and key."""
    assert _philox([0, 0, 0, 0], [0, 0]) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_uniform_is_philox_at_every_counter() -> None:
    seed = torch.tensor([[0, 0], [5, -1], [-(2**31), 7]], dtype=torch.int32)
    positions = torch.tensor([0, 1, 2**20])
    uniform = philox_uniform(seed, positions, 50)
    for row, (low, high) in enumerate(seed.tolist()):
        for index in range(50):
            word = _philox([index, int(positions[row]), 0, 0], [low % 2**32, high % 2**32])[0]
            assert uniform[row, index].item() == (word + 0.5) / 2**32


def _sample(logits: torch.Tensor, rows: int, temperature: float, top_p: float = 1.0, top_k: int = 0) -> torch.Tensor:
    return sample(
        logits.expand(rows, -1),
        torch.full((rows,), temperature),
        torch.full((rows,), top_p),
        torch.full((rows,), top_k),
        torch.stack((torch.arange(rows), torch.zeros(rows, dtype=torch.long)), dim=1),
        torch.full((rows,), 3),
    )


def test_greedy_takes_the_lowest_of_equal_logits() -> None:
    assert _sample(torch.tensor([0.0, 5.0, 5.0, 1.0]), 1, 0.0).tolist() == [1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_no_token_where_logits_are_not_finite(temperature: float, bad: float) -> None:
    lowest = float("-inf")
    rows = [[0.0, bad, 1.0], [bad] * 3, [lowest] * 3, [lowest, 7.0, lowest]]
    for row, expected in zip(rows, [NO_TOKEN] * 3 + [1], strict=True):
        assert _sample(torch.tensor(row), 2, temperature).tolist() == [expected] * 2


@pytest.mark.parametrize("temperature", [1e-37, 1e-38, 1e-40])
def test_tiny_temperatures_draw_the_largest(temperature: float) -> None:
    assert _sample(torch.tensor([0.0, 5.0, 1.0, 20.0]), 4, temperature).tolist() == [3] * 4


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(1.0, 1.0, 0), (0.5, 0.8, 0), (2.0, 1.0, 3), (1.0, 0.7, 2)]
)
def test_draws_follow_the_filtered_softmax(temperature: float, top_p: float, top_k: int) -> None:
    logits = torch.tensor([1.0, 3.0, 0.5, 2.5, 2.0])
    order = sorted(range(5), key=lambda i: -logits[i])
    kept = order[: top_k or 5]
    weight = {i: float(np.exp(float(logits[i]) / temperature)) for i in kept}
    total, reached, chosen = sum(weight.values()), 0.0, []
    for i in kept:
        if reached < top_p:
            chosen.append(i)
        reached += weight[i] / total
    expected = np.array([weight[i] if i in chosen else 0.0 for i in range(5)])
    counts = np.bincount(_sample(logits, 4000, temperature, top_p, top_k), minlength=5)
    assert (counts[expected == 0] == 0).all()
    assert np.abs(counts / 4000 - expected / expected.sum()).max() < 0.04


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 40)
    seed = torch.arange(12).view(6, 2)
    arguments = (torch.tensor([1.0, 0, 0.7, 1.0, 2.0, 1.0]), torch.full((6,), 0.9), torch.tensor([0, 0, 5, 1, 0, 9]))
    together = sample(logits, *arguments, seed, torch.arange(6))
    for row in range(6):
        one = slice(row, row + 1)
        alone = sample(logits[one], *(argument[one] for argument in arguments), seed[one], torch.arange(6)[one])
        assert alone.item() == together[row].item()


def test_logprobs_are_the_log_softmax() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 100.0]])
    got = token_logprobs(logits, torch.tensor([2, 0], dtype=torch.int32))
    assert got.tolist() == pytest.approx([3 - np.log(np.exp([1, 2, 3]).sum()), -100.0], rel=1e-6)
    assert token_logprobs(logits[:1], torch.tensor([-1], dtype=torch.int32)).isnan().all()
