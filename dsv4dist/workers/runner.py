"""One rank: loads its share, owns its caches, and runs one step packet at a time."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from dsv4dist.arch import arch_of
from dsv4dist.cache.groups import cache_groups, check_num_blocks, plan_num_blocks
from dsv4dist.cache.pool import LayerCaches, allocate_caches, cache_tensors
from dsv4dist.checkpoint.load import load_parameters
from dsv4dist.config.resolve import RunConfig
from dsv4dist.distributed.comm import Communicator
from dsv4dist.distributed.tp import TpInfo
from dsv4dist.errors import WorkerError
from dsv4dist.kernels.ops import choose_kernels, choose_ops
from dsv4dist.layers.overlap import Overlap
from dsv4dist.model.decoder import Model
from dsv4dist.step.buffers import StepBuffers, TokenBuffer, bucket_sizes, decode_widths
from dsv4dist.step.builder import build_metadata
from dsv4dist.step.metadata import StepMetadata
from dsv4dist.step.sections import split_sections
from dsv4dist.workers.executor import NO_TOKEN, StepResult
from dsv4dist.workers.graphs import DecodeGraphs, capture_on_all_ranks, describe_capture, eager_reason
from dsv4dist.workers.packet import Int32Array, PacketHeader, RowKind, StepKind, read_header
from dsv4dist.workers.sampler import sample, token_logprobs
from dsv4dist.workers.speculation import VerifyRows, count_right, following_tokens, propose, verify_rows

log = logging.getLogger(__name__)

CPU_CACHE_SHARE = 0.5
"""Share of the free memory of a CPU node that the caches of its ranks may take together, unless a size was given."""
SCORE_ROWS = 256
"""Rows whose logits are held at once while scoring; results do not depend on it."""


class ModelRunner:
    """Runs the steps of one rank. Call `load`, then `allocate`, then `execute` for every step, all on one thread."""

    def __init__(self, config: RunConfig, tp: TpInfo, comm: Communicator, device: torch.device) -> None:
        self.config, self.tp, self.comm, self.device = config, tp, comm, device
        self.dtype = getattr(torch, config.dtype)
        self.arch = arch_of(device)
        self._kernels, _ = choose_kernels(config.kernels, device.type, config.model.head_dim)
        self.ops = choose_ops(config.kernels, device.type, config.model.head_dim)
        self.caches: list[LayerCaches] = []
        self.graphs: DecodeGraphs | None = None
        self._groups = cache_groups(config.model, config.kv_cache_dtype, config.num_draft_layers)
        self.skipped_draft_tensors = 0

    def load(self) -> None:
        """Read this rank's share of the checkpoint and build the model.  Raises: CheckpointError."""
        loaded = load_parameters(
            self.config.directory,
            self.config.model,
            self.tp,
            self.dtype,
            self.device,
            self.config.num_draft_layers,
            keep_fp8=self.arch.fp8_format if self._keeps_fp8 else None,
        )
        self.skipped_draft_tensors = loaded.skipped_draft_tensors
        self.model = Model(
            self.config.model,
            loaded.tensors,
            self.tp,
            self.comm,
            self.ops,
            self.config.max_model_len,
            self.config.num_draft_layers,
            self._overlap(),
        )

    def cache_block_limits(self) -> dict[str, int]:
        """How many blocks of each cache group this rank has memory for; negative where not even the windows fit."""
        config = self.config
        return plan_num_blocks(
            self._groups,
            self._cache_memory_bytes(),
            config.max_num_seqs,
            config.max_num_batched_tokens,
            config.max_model_len,
            retain=config.enable_prefix_caching,
        )

    def allocate(self, num_blocks: dict[str, int]) -> str:
        """Allocate the caches with the block counts that all ranks agreed on, and capture decode steps.

        Returns what that took, or why they are not captured.  Raises: ConfigError for too few blocks.
        """
        check_num_blocks(num_blocks)
        config = self.config
        tokens_per_request = 1 + config.speculative_tokens
        self.buffers = StepBuffers(
            bucket_sizes(min(config.max_num_seqs * tokens_per_request, config.max_num_batched_tokens)),
            config.max_num_seqs,
            decode_widths(self._groups, config.max_model_len, max(tokens_per_request, config.run_ahead)),
            self.device,
            config.poison_memory,
        )
        words = 1 + 2 * config.speculative_tokens
        self._tokens = TokenBuffer(config.run_ahead, config.max_num_seqs, words, self.device)
        self.caches = allocate_caches(
            config.model,
            num_blocks,
            config.kv_cache_dtype,
            self.arch.fp8_format,
            self.device,
            config.poison_memory,
            config.num_draft_layers,
        )
        return self._capture()

    @torch.inference_mode()
    def execute(self, packet: Int32Array) -> Iterator[StepResult]:
        """Run the steps of a packet; yields the result of each as soon as it is there, while the next one runs.

        Raises: WorkerError for a packet that does not fit its header or this run's limits.
        """
        header = read_header(packet, self.config.max_num_seqs, self.config.max_num_batched_tokens)
        on_host = split_sections(packet, header.shape)
        bucket = self.buffers.bucket_of(header.shape) if _is_decode(header, on_host) else None
        if bucket is not None:
            yield from self._decode_steps(header, on_host, bucket)
            return
        if header.num_steps > 1:
            raise WorkerError(f"step packet: {header.num_steps} steps of {header.shape} fit no step buffer")
        started = time.perf_counter()
        on_device = torch.from_numpy(packet).to(self.device)
        max_len = int(on_host["seq_lens"].max(initial=0))
        tokens, logprobs, logits = self._run(split_sections(on_device, header.shape), max_len, _all_greedy(on_host))
        yield StepResult(
            generation=header.generation,
            step_id=header.step_id,
            token_ids=tokens.flatten().to(torch.int32).cpu().numpy(),
            logprobs=logprobs.numpy(),
            logits=logits.numpy(),
            elapsed_us=_microseconds_since(started),
        )

    def _decode_steps(self, header: PacketHeader, on_host: dict[str, Int32Array], bucket: int) -> Iterator[StepResult]:
        """Stage the packet once; on a GPU enqueue all its steps, then read their tokens one after the other."""
        started, all_greedy, num_requests = time.perf_counter(), _all_greedy(on_host), header.shape.num_requests
        self.buffers.stage(on_host, bucket)
        decode = self._decode if self.graphs is None else self.graphs.replay
        for ahead in range(header.num_steps if self._tokens.is_asynchronous else 0):
            self._tokens.write(ahead, decode(bucket, all_greedy)[:num_requests])
        for ahead in range(header.num_steps):
            if not self._tokens.is_asynchronous:
                self._tokens.write(ahead, decode(bucket, all_greedy)[:num_requests])
            yield StepResult(
                generation=header.generation,
                step_id=header.step_id + ahead,
                token_ids=self._tokens.read(ahead, num_requests).ravel(),
                logprobs=np.empty(0, np.float32),
                logits=np.empty((0, self.config.model.vocab_size), np.float32),
                elapsed_us=_microseconds_since(started),
            )
            started = time.perf_counter()

    def _decode(self, bucket: int, all_greedy: bool) -> torch.Tensor:
        """The padded step in the step buffer, in which all requests want tokens: int32 [requests, 1 + 2k].

        A function of device memory alone, with sizes that follow from the bucket and the run's limits. Without drafts
        the buffer then holds the step after this one.
        """
        sections = self.buffers.sections(bucket)
        step = build_metadata(self.config.model, self.ops, sections, self.config.max_model_len)
        streams = self.model.forward(step, self.caches)
        reqs = torch.arange(len(sections["seq_lens"]), device=self.device)
        tokens = self._sample(streams, step, sections, reqs, all_greedy).to(torch.int32)
        if self.model.draft is None:
            goes_on = sections["row_kind"] == RowKind.SAMPLE
            sections["token_ids"][: len(reqs)] = torch.where(goes_on, tokens[:, 0].clamp_min(0), 0)
            sections["seq_lens"] += goes_on
        return tokens

    def _run(
        self, sections: dict[str, torch.Tensor], max_len: int, all_greedy: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Any step, at its own size: new tokens, log-probabilities and logits, for those requests that want them."""
        step = build_metadata(self.config.model, self.ops, sections, max_len)
        streams = self.model.forward(step, self.caches)
        reqs = torch.nonzero(sections["row_kind"] == RowKind.SAMPLE).flatten()
        return self._sample(streams, step, sections, reqs, all_greedy), *self._score(streams, sections)

    def _sample(
        self,
        streams: torch.Tensor,
        step: StepMetadata,
        sections: dict[str, torch.Tensor],
        reqs: torch.Tensor,
        all_greedy: bool,
    ) -> torch.Tensor:
        """The new tokens and next drafts of the requests `reqs` [S], as [S, 1 + 2k]; see StepResult.token_ids."""
        k = self.config.speculative_tokens
        verify = verify_rows(reqs, sections, k)
        chosen = self._choose(streams, step, sections, verify, all_greedy)
        num_right = count_right(chosen, verify, step.token_ids)
        kept = torch.arange(k + 1, device=self.device) <= num_right.unsqueeze(1)
        drafts = chosen.new_empty(len(reqs), 0)
        if self.model.draft is not None:
            following = following_tokens(sections["targets"].long(), chosen, verify)
            drafts = propose(
                self.config.model,
                self.ops,
                self.model.draft,
                step,
                streams,
                following,
                verify,
                num_right,
                self.caches[-1],
                k,
            )
        return torch.cat((chosen.masked_fill(~kept, NO_TOKEN), drafts), dim=1)

    def _choose(
        self,
        streams: torch.Tensor,
        step: StepMetadata,
        sections: dict[str, torch.Tensor],
        verify: VerifyRows,
        all_greedy: bool,
    ) -> torch.Tensor:
        """The model's choice of token after every row of `verify.rows`, [S, 1 + k]; NO_TOKEN where it has none."""
        rows, per_row = verify.rows.flatten(), verify.rows.shape[1]
        reqs = verify.reqs.repeat_interleave(per_row)
        chosen = sample(
            self.model.head(streams[rows]),
            sections["temperature"].view(torch.float32)[reqs],
            sections["top_p"].view(torch.float32)[reqs],
            sections["top_k"][reqs],
            sections["seed"][reqs],
            step.positions[rows] + 1,
            all_greedy=all_greedy,
        )
        return chosen.view(-1, per_row)

    def _score(self, streams: torch.Tensor, sections: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities of the targets of all scored rows, and the logits of those that want them, in row order."""
        starts, row_kind = sections["query_start_loc"], sections["row_kind"]
        kind_of_row = torch.repeat_interleave(row_kind, (starts[1:] - starts[:-1]).long())
        rows = torch.nonzero(kind_of_row >= RowKind.SCORE).flatten()
        logprobs, wanted = [torch.empty(0)], [torch.empty(0, self.config.model.vocab_size)]
        for part in torch.split(rows, SCORE_ROWS) if rows.numel() else ():
            logits = self.model.head(streams[part])
            logprobs.append(token_logprobs(logits, sections["targets"][part]).cpu())
            wanted.append(logits[kind_of_row[part] == RowKind.SCORE_LOGITS].cpu())
        return torch.cat(logprobs), torch.cat(wanted)

    @property
    def _keeps_fp8(self) -> bool:
        """fp8 weights stay fp8 where kernels multiply them as they are and activations are not wider than theirs."""
        return self._kernels == "triton" and self.dtype.itemsize == 2

    def _overlap(self) -> Overlap:
        if self.device.type != "cuda" or self.config.enforce_eager:
            return Overlap()
        return Overlap.on(self.device, self.arch.main_first_tokens)

    @torch.inference_mode()
    def _capture(self) -> str:
        """Record the decode steps as graphs where that is possible; says what it took, or why not."""
        reason = eager_reason(self.config, self._kernels, self.comm, self.device)
        if reason is None:
            watched = [self.buffers.memory, *cache_tensors(self.caches)] if self.config.poison_memory else []
            graphs = DecodeGraphs(self._decode, self.buffers, watched)
            rows, reason = capture_on_all_ranks(graphs, self.comm, self.device)
            if reason is None:
                self.graphs = graphs
                return describe_capture(rows)
        if self.device.type == "cuda" and not self.config.enforce_eager and self.tp.rank == 0:
            log.warning("decode steps run eagerly, which is slower: %s", reason)
        return f"eager: {reason}"

    def _cache_memory_bytes(self) -> int:
        if self.config.kv_cache_memory_bytes is not None:
            return self.config.kv_cache_memory_bytes
        if self.device.type == "cpu":
            free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            return int(free * CPU_CACHE_SHARE) // self.tp.size
        free, total = torch.cuda.mem_get_info(self.device)
        return int(total * self.config.gpu_memory_utilization) - (total - free)


def _all_greedy(on_host: dict[str, Int32Array]) -> bool:
    return not (on_host["temperature"].view(np.float32) > 0).any()


def _microseconds_since(started: float) -> int:
    return int((time.perf_counter() - started) * 1e6)


def _is_decode(header: PacketHeader, sections: dict[str, Int32Array]) -> bool:
    """Whether every request of the step goes on by one decode row, or several with drafts, and wants tokens."""
    return header.kind is StepKind.DECODE and bool((sections["row_kind"] == RowKind.SAMPLE).all())


@dataclass(frozen=True)
class RunnerFactory:
    """Builds the runner of a rank inside its process; plain values, so that it can be sent there."""

    config: RunConfig

    def __call__(self, tp: TpInfo, comm: Communicator, device: torch.device) -> ModelRunner:
        return ModelRunner(self.config, tp, comm, device)
