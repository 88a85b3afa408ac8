"""Products, copies and kernels: right where they are right, and a planted error is seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tests.kernels.implementations  # noqa: F401  # before triton
from dsv4dist import Engine, EngineConfig, SamplingParams
from dsv4dist.distributed.comm import SingleProcess
from dsv4dist.errors import WorkerError
from dsv4dist.kernels.ops import Ops, reference_ops, triton_ops
from dsv4dist.kernels.paged_cache import PagedCache
from dsv4dist.smoke import gpu, kernels, model
from dsv4dist.smoke.collectives import CollectiveRunner, bus_gb_per_s
from dsv4dist.smoke.kernels import checked_ops, difference, kernel_errors, max_error

CPU = torch.device("cpu")


def test_a_right_product_and_copy() -> None:
    assert gpu.run_gemm(CPU, 64)[0] == 0
    assert gpu.run_copy(CPU, 1 << 12)[0] == 0
    report = gpu.measure_device("", "cpu")
    assert (report.gemm_wrong, report.copy_wrong) == (0, 0)
    assert min(report.gemm_tflop_per_s, report.copy_gb_per_s) > 0


def test_one_wrong_number_of_a_product_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = torch.mm

    def off_by_one(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        multiply(a, b, out=out)
        out[5, 7] += 1

    monkeypatch.setattr(torch, "mm", off_by_one)
    assert gpu.run_gemm(CPU, 64)[0] == 1
    monkeypatch.setattr(torch, "mm", lambda a, b, out: None)
    assert gpu.run_gemm(CPU, 64)[0] == 64, "nothing was written"


def test_difference_is_of_the_worst_row_and_exact_for_integers() -> None:
    expected = torch.tensor([[3.0, 4.0], [30.0, 40.0]])
    got = expected.clone()
    got[0, 0] += 0.5
    assert difference(got, expected) == pytest.approx(0.1)
    assert difference((got, 1), (expected, 1)) == pytest.approx(0.1)
    assert difference(expected, expected) == 0
    assert difference(torch.tensor([1, 2, 3, 5]), torch.tensor([1, 2, 3, 4])) == 0.25
    assert difference(expected[:1], expected) == float("inf")
    nan = torch.full((1, 2), float("nan"))
    assert difference(nan, nan) == 0, "memory that neither wrote"
    assert difference(nan, expected[:1]) == float("inf")
    assert difference(torch.ones(1, 2), torch.zeros(1, 2)) == float("inf")


def test_wrong_results_and_wrong_writes_are_noted_under_their_operation() -> None:
    right = reference_ops()

    def norm(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        return right.rms_norm(x, *rest) * 1.5

    def state(kv_score: torch.Tensor, ape: torch.Tensor, positions: torch.Tensor, *rest: Any) -> None:
        right.compress_state(kv_score, ape, positions + 1, *rest)

    errors: dict[str, float] = {}
    ops = checked_ops(replace(right, rms_norm=norm, compress_state=state), errors)
    ops.rms_norm(torch.randn(3, 8), torch.ones(8), 1e-6)
    assert errors.pop("rms_norm") == pytest.approx(0.5, rel=1e-3)
    cache = PagedCache(torch.zeros(2, 4, 8), 4)
    ops.compress_state(torch.randn(3, 8), torch.randn(4, 4), torch.arange(3), cache, torch.tensor([1, 5, -1]))
    assert errors.pop("compress_state") > max_error("compress_state")
    assert not errors


def short_prompt(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    monkeypatch.setattr(kernels, "prompt", lambda kind: model.prompt(kind)[:length])


def test_a_model_run_covers_the_operations(checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    short_prompt(monkeypatch, 130)
    errors = kernel_errors(checkpoint(**model.RECIPES["cpu"]), CPU)
    fp8_only = {"fp8_weight_linear"}
    assert set(errors) == {*Ops.__dataclass_fields__} - fp8_only
    assert not any(errors.values()), "references against themselves"


@pytest.mark.slow
def test_interpreted_kernels_agree(checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    short_prompt(monkeypatch, 129)
    sizes = model.RECIPES["cuda"]
    small = sizes["overrides"] | {"num_attention_heads": 2, "o_groups": 2}
    errors = kernel_errors(checkpoint(**sizes | {"overrides": small}), CPU, triton_ops())
    assert len(errors) == 13
    assert {op for op, error in errors.items() if not error <= max_error(op)} == set()


@pytest.mark.gpu
def test_a_gpu_passes_its_checks(checkpoint: Callable[..., Path]) -> None:
    report = gpu.measure_device("0", "cuda")
    assert (report.gemm_wrong, report.copy_wrong) == (0, 0)
    errors = kernel_errors(checkpoint(**model.RECIPES["cuda"]), torch.device("cuda", 0))
    assert set(errors) == {*Ops.__dataclass_fields__}
    assert {op: error for op, error in errors.items() if not error <= max_error(op)} == {}
    peers = gpu.measure_peers([str(i) for i in range(torch.cuda.device_count())])
    assert not peers.wrong


@pytest.mark.parametrize(
    ("kind", "other"), [("cpu", {"dtype": "bfloat16"}), ("cuda", {"dtype": "bfloat16", "kv_cache_dtype": "fp8_ds_mla"})]
)
def test_the_prompt_leaves_no_doubt(kind: str, other: dict[str, str], checkpoint: Callable[..., Path]) -> None:
    """The first choice leads by so much that no rounding changes it, here that of bf16 and of fp8 caches."""
    directory = checkpoint(**model.RECIPES[kind])
    options: dict[str, Any] = {"device": "cpu", "distributed_executor_backend": "local", **model.LIMITS}
    tokens = model.expected_tokens(directory, kind)
    with Engine(EngineConfig(directory, **options)) as engine:
        (scored,) = engine.score([model.prompt(kind) + tokens], return_logits=True)
    assert scored.logits is not None
    best = np.sort(scored.logits[-3:-1], axis=1)[:, -2:]
    assert (best[:, 1] - best[:, 0] > 1).all()
    assert scored.logits[-3:-1].argmax(axis=1).tolist() == tokens
    with Engine(EngineConfig(directory, **options, **other)) as engine:
        params = SamplingParams(max_tokens=model.NEW_TOKENS, ignore_eos=True)
        assert engine.generate([model.prompt(kind)], params)[0].token_ids == tokens


class WrongSums(SingleProcess):
    """A group of one that breaks one place of every sum."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor[3] += 1
        return tensor


def test_all_reduce_is_checked_and_timed() -> None:
    packet = np.array([4096, 5], np.int32)
    (result,) = CollectiveRunner(SingleProcess.tp, SingleProcess(), CPU).execute(packet)
    assert len(result.logprobs) == 5
    with pytest.raises(WorkerError, match="4096 bytes: 1 of 1024 sums are wrong, the first at 3: 4 for 3"):
        next(CollectiveRunner(WrongSums.tp, WrongSums(), CPU).execute(packet))
    assert bus_gb_per_s(10**9, 2, 1e6) == pytest.approx(1.0)
    assert bus_gb_per_s(10**9, 8, 1e6) == pytest.approx(1.75)
