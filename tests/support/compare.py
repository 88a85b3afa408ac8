"""When two results count as equal, and what may excuse a difference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from dsv4dist.config.model import load_model_config
from tests.support import oracle

TOSS_UP = 2e-6
"""Two scores this close may be ordered either way in fp32, and every row from there on may differ by any amount."""


def random_tokens(length: int, seed: int = 0, vocab_size: int = 256) -> list[int]:
    """Token ids of a prompt; 0 and 1 are left out, since they begin and end a text."""
    drawn: list[int] = np.random.default_rng([seed, length]).integers(2, vocab_size, length).tolist()
    return drawn


def assert_logits_close(
    got: np.ndarray, expected: np.ndarray, gaps: Callable[[], np.ndarray], atol: float, what: str = ""
) -> None:
    """Compare logits [T, vocab] row by row.

    gaps  the smallest score difference at a selection border of each position [T], asked for only if rows differ; a
          difference is excused only at or after a position where that is a toss-up
    """
    assert got.shape == expected.shape, f"{what}: {got.shape} and {expected.shape}"
    assert np.isfinite(got).all(), f"{what}: not finite in rows {np.flatnonzero(~np.isfinite(got).all(axis=-1))[:10]}"
    worst = np.max(np.abs(got.astype(np.float64) - expected), axis=-1)
    rows = np.flatnonzero(worst > atol)
    if rows.size == 0:
        return
    smallest = gaps()[: rows[0] + 1]
    assert np.min(smallest) < TOSS_UP, (
        f"{what}: {rows.size} of {len(worst)} rows differ by more than {atol}, first row {rows[0]} by "
        f"{worst[rows[0]]:.3g}, at most {np.max(worst):.3g}; smallest selection gap up to there {np.min(smallest):.3g}"
    )


class SelectionGaps:
    """Selection gaps of any sequence under the model of one release-format directory, from the float64 oracle."""

    def __init__(self, directory: Path) -> None:
        self.config, self.params = load_model_config(directory), oracle.read_parameters(directory)

    def of(self, token_ids: list[int]) -> np.ndarray:
        gaps = oracle.Gaps(len(token_ids))
        oracle.model_logits(token_ids, self.params, self.config, gaps)
        return gaps.smallest
