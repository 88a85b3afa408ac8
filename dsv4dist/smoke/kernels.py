"""Every kernel against its reference: a tiny model runs, and each operation that it calls is computed both ways."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dsv4dist.config.resolve import resolve
from dsv4dist.config.runtime import EngineConfig
from dsv4dist.distributed.comm import Communicator
from dsv4dist.distributed.tp import TpInfo
from dsv4dist.engine.core import EngineCore
from dsv4dist.engine.request import SamplingParams
from dsv4dist.kernels.ops import Ops, reference_ops
from dsv4dist.kernels.paged_cache import PagedCache
from dsv4dist.kernels.reference.pages import read_entries
from dsv4dist.smoke.model import LIMITS, NEW_TOKENS, prompt
from dsv4dist.workers.local_executor import LocalExecutor
from dsv4dist.workers.runner import ModelRunner, RunnerFactory

EXACT = ("step_rows", "window_key_list", "visible_key_list")
_WIDE = {"select_key_list": 0.01, "q_rope_kv_insert": 0.05, "compress_store": 0.05, "indexer_query": 0.05}


def max_error(op: str) -> float:
    """The largest error of an operation that still counts as right, see `difference`.

    Integers are equal. Rounding to bf16 moves a row by less than 0.02 of its size, a step of e4m3 by less than 0.05.
    Of the selected entries one in a hundred may be another one whose score is as good as equal.
    """
    return 0.0 if op in EXACT else _WIDE.get(op, 0.02)


def kernel_errors(model: Path, device: torch.device, ops: Ops | None = None) -> dict[str, float]:
    """The largest error of every operation over a prompt and a decode step of the checkpoint in `model`.

    ops  what is checked, None = what a rank on this device takes
    """
    options = EngineConfig(
        model, device=device.type, distributed_executor_backend="local", enforce_eager=True, run_ahead=1, **LIMITS
    )
    config = resolve(options, gpu_available=device.type != "cpu")
    factory = CheckedFactory(config, device, ops)
    core = EngineCore(config, LocalExecutor(factory), tokenizer=None)
    try:
        core.generate([prompt(device.type)], SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True))
    finally:
        core.shutdown()
    return factory.errors


@dataclass(frozen=True)
class CheckedFactory(RunnerFactory):
    """Builds a runner on `device` whose operations are held against their references; `errors` fills while it runs."""

    device: torch.device
    ops: Ops | None = None
    errors: dict[str, float] = field(default_factory=dict)

    def __call__(self, tp: TpInfo, comm: Communicator, device: torch.device) -> ModelRunner:
        runner = super().__call__(tp, comm, self.device)
        runner.ops = checked_ops(self.ops or runner.ops, self.errors)
        return runner


def checked_ops(ops: Ops, errors: dict[str, float]) -> Ops:
    """`ops`, each of which also runs its reference on copies and notes its largest error in `errors`."""
    reference = reference_ops()

    def checked(name: str) -> Callable[..., Any]:
        op, meant = getattr(ops, name), getattr(reference, name)

        def call(*args: Any, **options: Any) -> Any:
            copies, copied_options = _copied(args), _copied(options)
            result = op(*args, **options)
            expected = meant(*copies, **copied_options)
            error = difference(_comparable(name, result, args), _comparable(name, expected, copies))
            errors[name] = max(errors.get(name, 0.0), error)
            return result

        return call

    return Ops(**{one.name: checked(one.name) for one in fields(Ops)})


def difference(got: Any, expected: Any) -> float:
    """How far two results of one operation are apart; infinite where one of them is no number, or of another shape.

    Integers: the share of those that differ. Floats: of the rows along the last dimension, the largest distance over
    the length of the expected row, which counts as at least a thousandth of the longest. Records: the largest of their
    fields.
    """
    if isinstance(expected, torch.Tensor):
        return _tensor_difference(got, expected)
    if isinstance(expected, list | tuple):
        return max((difference(a, b) for a, b in zip(got, expected, strict=True)), default=0.0)
    if is_dataclass(expected):
        return max(difference(getattr(got, one.name), getattr(expected, one.name)) for one in fields(expected))
    return 0.0


def _tensor_difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    if got.shape != expected.shape:
        return float("inf")
    if expected.numel() == 0:
        return 0.0
    if not expected.is_floating_point():
        return float((got != expected).double().mean())
    a, b = got.float().double(), expected.float().double()
    same = (a == b) | (a.isnan() & b.isnan())
    apart = torch.where(same, 0.0, a - b).norm(dim=-1)
    length = torch.where(b.isfinite(), b, 0.0).norm(dim=-1)
    worst = (apart / length.clamp_min(float(length.max()) * 1e-3)).masked_fill(apart == 0, 0.0).max()
    return float("inf") if bool(worst.isnan()) else float(worst)


def _comparable(name: str, result: Any, args: tuple[Any, ...]) -> list[Any]:
    """What an operation returned, without what has no meaning, and the entries of every cache it may have written."""
    if name.endswith("_key_list"):  # behind the last list the memory is anything
        indices, indptr = result
        listed = indices[: int(indptr[-1])]
        if name == "select_key_list":  # sorted within each row
            row = torch.arange(len(indptr) - 1, device=indptr.device).repeat_interleave(indptr.diff())
            listed = ((row << 32) + listed).sort().values
        result = listed, indptr
    caches = [one for one in args if isinstance(one, PagedCache)]
    return [result, *(read_entries(one, torch.arange(one.num_slots, device=one.data.device)) for one in caches)]


def _copied(value: Any) -> Any:
    """A deep copy of tensors, and of the records and tuples that hold them."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, tuple | list):
        return type(value)(_copied(one) for one in value)
    if isinstance(value, dict):
        return {name: _copied(one) for name, one in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{one.name: _copied(getattr(value, one.name)) for one in fields(value)})
    return value
