"""A Ray-distributed tensor-parallel runtime for DeepSeek-V4."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsv4dist.config.runtime import EngineConfig
    from dsv4dist.engine.async_engine import AsyncEngine
    from dsv4dist.engine.engine import Engine
    from dsv4dist.engine.request import RequestOutput, SamplingParams, ScoreOutput

__version__ = "0.1.0"
__all__ = ["AsyncEngine", "Engine", "EngineConfig", "RequestOutput", "SamplingParams", "ScoreOutput"]

_HOMES = {
    "AsyncEngine": "dsv4dist.engine.async_engine",
    "Engine": "dsv4dist.engine.engine",
    "EngineConfig": "dsv4dist.config.runtime",
    "RequestOutput": "dsv4dist.engine.request",
    "SamplingParams": "dsv4dist.engine.request",
    "ScoreOutput": "dsv4dist.engine.request",
}


def __getattr__(name: str) -> object:
    """Import the public names on first use, so that importing the package stays free of torch and ray."""
    if name not in _HOMES:
        raise AttributeError(f"module 'dsv4dist' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
