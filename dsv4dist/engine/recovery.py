"""Starting the ranks, and starting them again when they are lost."""

from __future__ import annotations

import logging
import time

from dsv4dist.errors import PlacementError, WorkerError
from dsv4dist.workers.executor import Executor, WorkerReport
from dsv4dist.workers.failure import RankFailure

log = logging.getLogger(__name__)


class Recovery:
    """Brings the ranks up, at first and after every loss, as often as it may."""

    def __init__(self, executor: Executor, max_recoveries: int) -> None:
        self._executor = executor
        self._max_recoveries = max_recoveries
        self.used = 0
        """Recoveries that were begun."""
        self.seconds = 0.0
        """Time that they took altogether."""

    def start(self) -> WorkerReport:
        """Start the ranks.  Raises: ConfigError, PlacementError, WorkerError."""
        try:
            return self._executor.start()
        except WorkerError as lost:
            return self.recover(lost)

    def recover(self, lost: WorkerError) -> WorkerReport:
        """Start the ranks again after an error of the executor.

        Raises: WorkerError, the last loss, when its kind would come again or no recovery is left; or when the ranks
        find no place any more.
        """
        while True:
            if not (isinstance(lost, RankFailure) and lost.kind.can_recover):
                raise lost
            if self.used == self._max_recoveries:
                raise WorkerError(f"{lost}; no recovery of {self._max_recoveries} is left") from lost
            self.used += 1
            event = f"{lost}; noticed {lost.unseen_s:.1f} s after the last sign of life of all ranks"
            log.warning("lost %s; recovery %d of %d begins", event, self.used, self._max_recoveries)
            started = time.monotonic()
            try:
                report = self._executor.restart()
            except PlacementError as error:
                raise WorkerError(f"{lost}; and there is no place for the ranks any more: {error}") from error
            except WorkerError as error:
                lost = error
                continue
            finally:
                self.seconds += time.monotonic() - started
            log.warning(
                "recovered from %s; %d ranks run again after %.1f s; %d recoveries left",
                event,
                len(report.ranks),
                time.monotonic() - started,
                self._max_recoveries - self.used,
            )
            return report
