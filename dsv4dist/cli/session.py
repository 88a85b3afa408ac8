"""An engine for one command: signs of life while it starts, signals that end it in order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dsv4dist.cli.progress import waiting
from dsv4dist.cli.signals import take_signals
from dsv4dist.config.runtime import EngineConfig

if TYPE_CHECKING:
    from dsv4dist.engine.engine import Engine


@contextmanager
def open_engine(config: EngineConfig) -> Iterator[Engine]:
    """Start an engine and shut it down at the end of the block, however that is reached."""
    ranks = config.tensor_parallel_size
    with waiting(f"loading the model on {ranks} rank{'s' * (ranks > 1)}"):
        from dsv4dist.engine.engine import Engine

        engine = Engine(config)
    with engine:
        take_signals()  # Ray installs a SIGTERM handler of its own when it starts
        yield engine
