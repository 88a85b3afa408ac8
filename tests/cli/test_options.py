"""Options come from EngineConfig and nowhere else."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest

from dsv4dist.cli.options import HELP, OptionError, check_options, engine_options
from dsv4dist.config.runtime import CHOICES, EngineConfig
from dsv4dist.errors import ConfigError
from tests.cli.support import fails

PYTHON_ONLY = {"poison_memory"}


def test_every_field_is_an_option_or_meant_for_python() -> None:
    names = {field.name for field in fields(EngineConfig)}
    assert set(HELP) | PYTHON_ONLY == names
    assert not set(HELP) & PYTHON_ONLY
    assert set(CHOICES) <= set(HELP)


def test_defaults_are_those_of_the_dataclass() -> None:
    @engine_options
    def command(*, config: EngineConfig, other: int = 3) -> Any:
        return config, other

    parameters = inspect.signature(command).parameters
    for field in fields(EngineConfig):
        if field.name in HELP:
            default = inspect.Parameter.empty if field.default is MISSING else field.default
            assert parameters[field.name].default == default
    values = {name: one.default for name, one in parameters.items()} | {"model": "here", "max_num_seqs": 5}
    assert command(**values) == (EngineConfig(model="here", max_num_seqs=5), 3)


def test_both_names_of_the_parallel_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--tp", "--tensor-parallel-size"):
        fails(
            ["generate", "--model", str(tmp_path), "--prompt", "a", flag, "0"], 2, "--tensor-parallel-size is 0", capsys
        )


def test_option_errors_differ_from_errors_in_files(tmp_path: Path, checkpoint: Any) -> None:
    with pytest.raises(OptionError, match=r"--dtype is 'int3'; choose from .*; --max-num-seqs is 0"):
        check_options(EngineConfig(model=tmp_path, dtype="int3", max_num_seqs=0))
    with pytest.raises(OptionError, match=r"size 3 does not divide num_attention_heads = 8.*use one of 1, 2, 4"):
        check_options(EngineConfig(model=checkpoint("tiny"), tensor_parallel_size=3))
    with pytest.raises(ConfigError, match=r"no config\.json") as caught:
        check_options(EngineConfig(model=tmp_path))
    assert not isinstance(caught.value, OptionError)
    assert check_options(EngineConfig(model=checkpoint("tiny"), tensor_parallel_size=4)).vocab_size == 512
