"""Signs of life on a terminal's standard error; nothing anywhere else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(what: str, position: Callable[[], tuple[int, int]], unit: str) -> Iterator[None]:
    """Show `position()` = (done, total) of `unit` until the block ends. `position` is called from another thread."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console, RenderableType
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    class PolledProgress(Progress):
        def get_renderables(self) -> Iterable[RenderableType]:
            for task in self.tasks:
                task.completed, task.total = position()
            return super().get_renderables()

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeElapsedColumn())
    # Rich would send standard output to its own console, here standard error: right only if both are the terminal.
    with PolledProgress(
        *columns,
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=sys.stdout is not None and sys.stdout.isatty(),
    ) as bar:
        bar.add_task(what)
        yield


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show that something without a measure of progress goes on until the block ends."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(what):
        yield
