"""An engine for one command: signs of life while it starts, signals that end it in order."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dsv4dist.cli.progress import waiting
from dsv4dist.cli.signals import take_signals
from dsv4dist.config.runtime import EngineConfig
from dsv4dist.workers.processes import children, descendants, kill, wait_gone

if TYPE_CHECKING:
    from dsv4dist.engine.engine import Engine


@contextmanager
def open_engine(config: EngineConfig) -> Iterator[Engine]:
    """Start an engine and shut it down at the end of the block, however that is reached."""
    ranks = config.tensor_parallel_size
    with waiting(f"loading the model on {ranks} rank{'s' * (ranks > 1)}"):
        from dsv4dist.engine.engine import Engine

        with no_orphans():
            engine = Engine(config)
    with engine:
        take_signals()  # Ray installs a SIGTERM handler of its own when it starts
        yield engine


@contextmanager
def no_orphans() -> Iterator[None]:
    """End what the block has started if it does not complete.

    A signal can interrupt Ray between starting its processes and knowing them; some outlive their parents then."""
    before = children(os.getpid())
    try:
        yield
    except BaseException:
        started = descendants(child for child in children(os.getpid()) if child not in before)
        kill(started)
        wait_gone(started, timeout_s=1.0)
        raise
