"""Ranks that share one GPU over gloo, and a rank in an NCCL group of its own: the same tokens as one rank alone.

NCCL refuses two ranks on a device, so what graphs capture of it is a group of one; larger groups run eagerly here.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from dsv4dist import EngineConfig, SamplingParams
from dsv4dist.config.resolve import resolve
from dsv4dist.distributed.comm import SingleProcess, TorchDistributed, open_communicator
from dsv4dist.distributed.tp import TpInfo
from dsv4dist.workers.local_executor import LocalExecutor
from dsv4dist.workers.runner import ModelRunner
from tests.support.compare import random_tokens
from tests.support.stepping import Decoder

pytestmark = pytest.mark.gpu
LENGTHS = (5, 130, 2100)


def options(directory: str, tp_size: int, dtype: str) -> EngineConfig:
    return EngineConfig(
        model=directory,
        tensor_parallel_size=tp_size,
        device="cuda",
        dtype=dtype,
        kv_cache_dtype="fp8_ds_mla",
        max_model_len=4096,
        max_num_seqs=8,
        kv_cache_memory_bytes=1 << 30,
    )


def generate(config: EngineConfig, tp: TpInfo, comm: Any) -> tuple[list[list[int]], bool]:
    """Tokens of a few requests as one rank sees them, and whether decode steps were captured."""
    run = resolve(config, gpu_available=True)
    device = torch.device("cuda:0")

    class Executor(LocalExecutor):
        def __init__(self) -> None:
            self.runner = ModelRunner(run, tp, comm, device)
            self._results = iter(())

    executor = Executor()
    report = executor.start()
    engine = SimpleNamespace(config=run, report=report, _executor=executor)
    params = [SamplingParams(temperature=float(i % 2), seed=i + 1) for i in range(len(LENGTHS))]
    one = Decoder(engine, [random_tokens(length, seed=length) for length in LENGTHS], params)
    one.prefill()
    one.step([0, 1, 2], num_steps=4)
    one.step([2, 0])
    return one.outputs, executor.runner.graphs is not None


def rank_main(rank: int, size: int, port: int, directory: str, backend: str, dtype: str, out: str) -> None:
    tp, host = TpInfo(rank, size), "127.0.0.1"
    store = dist.TCPStore(host, port, size, True) if rank == 0 else None
    if size == 1:
        torch.cuda.set_device(0)
        dist.init_process_group(backend, store=store, rank=0, world_size=1, device_id=torch.device("cuda:0"))
        comm: Any = TorchDistributed(tp)
    else:
        device = torch.device("cuda:0")
        comm = open_communicator(tp, device, (host, port), 120, own_host=host, store=store, backend=backend)
    found = generate(options(directory, size, dtype), tp, comm)
    Path(out, f"{rank}.json").write_text(json.dumps(found))
    comm.barrier()
    comm.close()


def run_ranks(size: int, backend: str, directory: Path, dtype: str, out: Path) -> list[tuple[list[list[int]], bool]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(rank_main, (size, port, str(directory), backend, dtype, str(out)), nprocs=size)
    return [tuple(json.loads((out / f"{rank}.json").read_text())) for rank in range(size)]


def test_an_nccl_group_is_captured(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    directory = checkpoint("flash-layer")
    ((tokens, captured),) = run_ranks(1, "nccl", directory, "bfloat16", tmp_path)
    alone, captured_alone = generate(options(str(directory), 1, "bfloat16"), TpInfo(), SingleProcess())
    assert captured
    assert captured_alone
    assert tokens == alone


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_over_gloo(size: int, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    directory = checkpoint("flash-layer", overrides={"o_groups": 4})
    found = run_ranks(size, "gloo", directory, "float32", tmp_path)
    alone, _ = generate(options(str(directory), 1, "float32"), TpInfo(), SingleProcess())
    for tokens, captured in found:
        assert not captured
        assert tokens == alone
