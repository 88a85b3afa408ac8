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
from dsv4dist.workers.ray_cluster import RayConnection, connect_ray, joins_cluster


class Engine(EngineCore):
    """Serves requests with one model; a context manager, since it owns processes.

    Raises on construction: ConfigError, CheckpointError, UnsupportedError before anything is started; PlacementError
    and WorkerError while the ranks start.
    """

    def __init__(self, options: EngineConfig) -> None:
        from dsv4dist.checkpoint.sources import check_checkpoint

        options.check()
        connection = _joined_cluster(options)
        try:
            config = resolve(options, gpu_available=_gpu_available(options, connection))
            check_tp_size(config.model, config.tp_size)
            check_checkpoint(config.directory, config.model, config.num_draft_layers)
            tokenizer = load_tokenizer(config.directory)
            executor = _make_executor(options, config, connection)
        except BaseException:
            if connection is not None:
                connection.close()
            raise
        super().__init__(
            config,
            executor,
            tokenizer,
            options.seed,
            Path(options.trace) if options.trace is not None else None,
            options.max_recoveries,
        )

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()


def _joined_cluster(options: EngineConfig) -> RayConnection | None:
    """The cluster that has to say which device `auto` is: the ranks will run there, and perhaps not on this machine."""
    if options.device != "auto" or options.distributed_executor_backend != "ray" or not joins_cluster(options.address):
        return None
    return connect_ray(options.address, options.tensor_parallel_size)


def _gpu_available(options: EngineConfig, connection: RayConnection | None) -> bool:
    if options.device != "auto":
        return False
    if connection is not None:
        return connection.has_gpus()
    import torch

    return torch.cuda.is_available()


def _make_executor(options: EngineConfig, config: RunConfig, connection: RayConnection | None) -> Executor:
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
        connection=connection,
        placement_timeout_s=options.placement_timeout_s,
        step_timeout_s=options.step_timeout_s,
    )
