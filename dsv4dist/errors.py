"""The errors that this package raises on purpose. Each message is one line: what, found, expected or what to do."""

from __future__ import annotations

NOT_FINITE = "the logits are not finite; check the checkpoint and --dtype"
"""Why a request cannot be served whose logits are NaN or infinite."""


class Dsv4Error(Exception):
    """Base of every error that a user can cause; the command line prints it as one line."""


class ConfigError(Dsv4Error):
    """A configuration file or option that cannot be used."""


class CheckpointError(Dsv4Error):
    """A checkpoint directory that cannot be read or does not hold what its configuration asks for."""


class RequestError(Dsv4Error):
    """A request that cannot be served: empty, too long, or with values out of range."""


class ShapeError(Dsv4Error):
    """A tensor whose shape, dtype or stride an operation does not accept."""

    def __init__(self, name: str, expected: object, got: object) -> None:
        super().__init__(f"{name}: expected {expected}, got {got}")


class UnsupportedError(Dsv4Error):
    """A combination of options, device and operation that does not exist."""


class MeasurementError(Dsv4Error):
    """Some measurements of a run failed; the others are shown."""


class PlacementError(Dsv4Error):
    """The cluster cannot place the ranks that were asked for."""


class WorkerError(Dsv4Error):
    """A rank failed, was lost or stopped answering."""


def one_error(kind: type[Dsv4Error], where: str, problems: list[str]) -> Dsv4Error:
    """Join several problems found in one place into one error of `kind`."""
    return kind(f"{where}: {'; '.join(problems)}")
