"""Shared fixtures: tiny checkpoints made once per session, and engines on them that tests may share."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here may reach for a hub
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import pytest
import torch

import tests.kernels.implementations  # noqa: F401  # must come before anything that imports triton
from dsv4dist.config.runtime import EngineConfig
from dsv4dist.env import prepare_private_ray

prepare_private_ray()  # before anything imports Ray, which else listens on the machine's outside address

CPU_FP32: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "kv_cache_dtype": "float32",
    "distributed_executor_backend": "local",
    "max_model_len": 1024,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 1024,
}


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # the models are tiny: more threads only wait for each other


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`checkpoint(preset, **options of make_checkpoint)` -> its directory; the same arguments share one."""
    from dsv4dist.checkpoint.random_checkpoint import make_checkpoint

    made: dict[str, Path] = {}

    def make(preset: str = "tiny", **options: Any) -> Path:
        key = json.dumps([preset, options], sort_keys=True)
        if key not in made:
            directory = tmp_path_factory.mktemp(preset)
            make_checkpoint(directory, preset=preset, **options)
            made[key] = directory
        return made[key]

    return make


def cpu_config(model: Path, **options: Any) -> EngineConfig:
    """An EngineConfig for a tiny model on CPU, in fp32, in this process unless `options` say otherwise."""
    return EngineConfig(model=model, **{**CPU_FP32, **options})


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """`engine(directory, **options of EngineConfig)` -> a started engine, shared within the module, closed after it."""
    from dsv4dist import Engine

    started: dict[str, Any] = {}

    def start(model: Path, **options: Any) -> Any:
        key = json.dumps([str(model), options], sort_keys=True)
        if key not in started:
            started[key] = Engine(cpu_config(model, **options)).__enter__()
        return started[key]

    yield start
    for one in started.values():
        one.__exit__(None, None, None)
