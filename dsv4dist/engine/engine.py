"""The engine as users make it: from options to a running EngineCore."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from dsv4dist.config.resolve import RunConfig, resolve
from dsv4dist.config.runtime import EngineConfig
from dsv4dist.distributed.tp import check_tp_size
from dsv4dist.engine.core import EngineCore
from dsv4dist.engine.tokenizer import load_tokenizer
from dsv4dist.workers.executor import Executor


class Engine(EngineCore):
    """Serves requests with one model; a context manager, since it owns processes.

    Raises on construction: ConfigError, CheckpointError, UnsupportedError before anything is started; PlacementError
    and WorkerError while the ranks start.
    """

    def __init__(self, options: EngineConfig) -> None:
        from dsv4dist.checkpoint.sources import check_checkpoint

        options.check()
        config = resolve(options, gpu_available=_gpu_available(options))
        check_tp_size(config.model, config.tp_size)
        check_checkpoint(config.directory, config.model, config.num_draft_layers)
        trace = Path(options.trace) if options.trace is not None else None
        super().__init__(config, _make_executor(options, config), load_tokenizer(config.directory), options.seed, trace)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()


def _gpu_available(options: EngineConfig) -> bool:
    if options.device != "auto":
        return False
    import torch

    return torch.cuda.is_available()


def _make_executor(options: EngineConfig, config: RunConfig) -> Executor:
    from dsv4dist.workers.runner import RunnerFactory

    factory = RunnerFactory(config)
    if options.distributed_executor_backend == "local":
        from dsv4dist.workers.local_executor import LocalExecutor

        return LocalExecutor(factory)
    from dsv4dist.workers.ray_executor import RayExecutor

    return RayExecutor(
        factory,
        config.tp_size,
        config.device,
        address=options.address,
        placement_timeout_s=options.placement_timeout_s,
        step_timeout_s=options.step_timeout_s,
    )
