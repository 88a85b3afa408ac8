"""Any way of cutting requests into steps gives the same logits: prefill then decode, mixed rows in any order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.compare import SelectionGaps, assert_logits_close, random_tokens
from tests.support.stepping import Step, Stepper

CLOSE = 1e-4
PRESETS = ["tiny-swa", "tiny-csa", "tiny-hca", "tiny"]
LIMITS = {"max_num_batched_tokens": 640, "max_num_seqs": 24, "max_model_len": 640, "poison_memory": True}


class CheckedStepper(Stepper):
    """A stepper that compares with one step of everything."""

    def __init__(self, directory: Path, engine: Any) -> None:
        super().__init__(engine)
        self.gaps = SelectionGaps(directory)

    def one_shot(self, sequence: list[int]) -> np.ndarray:
        return self.run([sequence], [[(0, len(sequence))]])[0]

    def check(self, sequence: list[int], got: np.ndarray, expected: np.ndarray, what: str) -> None:
        assert_logits_close(got, expected, lambda: self.gaps.of(sequence), CLOSE, what)


@pytest.fixture(scope="module", params=PRESETS)
def stepper(
    request: pytest.FixtureRequest, checkpoint: Callable[..., Path], engine: Callable[..., Any]
) -> CheckedStepper:
    directory = checkpoint(request.param)
    return CheckedStepper(directory, engine(directory, **LIMITS))


@pytest.mark.parametrize("base", [0, 116, 248], ids=lambda base: f"from {base + 1}")
def test_prefill_of_n_then_one_token_at_a_time(stepper: CheckedStepper, base: int) -> None:
    """For 24 neighbouring n at once: n tokens in one step, then 12 decode steps, against one step of everything."""
    sequence, extra = random_tokens(300, seed=base), 12
    splits = range(base + 1, base + 25)
    expected = stepper.one_shot(sequence)
    got: list[np.ndarray] = []
    for part in (splits[:12], splits[12:]):
        prefills: list[Step] = [[(i, n)] for i, n in enumerate(part)]
        decodes: list[Step] = [[(i, 1) for i in range(len(part))]] * extra
        got += stepper.run([sequence[: n + extra] for n in part], prefills + decodes, num_prompt=list(part))
    for n, logits in zip(splits, got, strict=True):
        stepper.check(sequence[: n + extra], logits, expected[: n + extra], f"prefill of {n}")


@st.composite
def schedules(draw: st.DrawFn) -> tuple[list[int], list[Step]]:
    """Lengths of a few sequences, and steps that advance all of them to their end, rows in changing order."""
    lengths = draw(st.lists(st.integers(1, 150), min_size=1, max_size=4))
    left, steps = dict(enumerate(lengths)), []
    while left:
        rows = draw(st.lists(st.sampled_from(sorted(left)), min_size=1, max_size=len(left), unique=True))
        step = []
        for which in rows:
            count = min(left[which], draw(st.sampled_from([1, 2, 3, 4, 5, 8, 31, 32, 33, 64, 127, 128])))
            step.append((which, count))
            left[which] -= count
            if not left[which]:
                del left[which]
        steps.append(step)
    return lengths, steps


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(case=schedules(), seed=st.integers(0, 1000))
def test_any_schedule_equals_one_shot(stepper: CheckedStepper, case: tuple[list[int], list[Step]], seed: int) -> None:
    lengths, steps = case
    sequences = [random_tokens(length, seed=seed + i) for i, length in enumerate(lengths)]
    got = stepper.run(sequences, steps)
    for i, sequence in enumerate(sequences):
        stepper.check(sequence, got[i], stepper.one_shot(sequence), f"sequence {i} of {lengths} in {steps}")


def test_a_dropped_request_leaves_nothing_behind(stepper: CheckedStepper) -> None:
    """A request given up in the middle, and one begun again from its start, as after a preemption."""
    first, second = random_tokens(203, seed=1), random_tokens(70, seed=2)
    expected = stepper.one_shot(second)
    for stop in (5, 67, 130):
        stepper.run([first], [[(0, stop)]])
        (again,) = stepper.run([second], [[(0, 45)], *([[(0, 1)]] * 25)], num_prompt=[45])
        stepper.check(second, again, expected, f"after {stop} tokens")
