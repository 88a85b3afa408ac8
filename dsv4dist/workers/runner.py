"""One rank: loads its share, owns its caches, and runs one step packet at a time."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch

from dsv4dist.arch import arch_of
from dsv4dist.cache.groups import cache_groups, check_num_blocks, plan_num_blocks
from dsv4dist.cache.pool import LayerCaches, allocate_caches
from dsv4dist.checkpoint.load import load_parameters
from dsv4dist.config.resolve import RunConfig
from dsv4dist.distributed.comm import Communicator
from dsv4dist.distributed.tp import TpInfo
from dsv4dist.kernels.ops import choose_ops
from dsv4dist.model.decoder import Model
from dsv4dist.step.buffers import StepBuffers, bucket_sizes, decode_widths
from dsv4dist.step.builder import build_metadata
from dsv4dist.step.metadata import StepMetadata
from dsv4dist.step.sections import split_sections
from dsv4dist.workers.executor import NO_TOKEN, StepResult
from dsv4dist.workers.packet import Int32Array, PacketHeader, RowKind, StepKind, read_header
from dsv4dist.workers.sampler import sample, token_logprobs
from dsv4dist.workers.speculation import VerifyRows, count_right, following_tokens, propose, verify_rows

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
        self.ops = choose_ops(config.kernels, device.type, config.model.head_dim)
        self.caches: list[LayerCaches] = []
        self._groups = cache_groups(config.model, config.kv_cache_dtype, config.num_draft_layers)
        self.skipped_draft_tensors = 0

    def load(self) -> None:
        """Read this rank's share of the checkpoint and build the model.  Raises: CheckpointError."""
        loaded = load_parameters(
            self.config.directory, self.config.model, self.tp, self.dtype, self.device, self.config.num_draft_layers
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

    def allocate(self, num_blocks: dict[str, int]) -> None:
        """Allocate the caches with the block counts that all ranks agreed on.  Raises: ConfigError if too few."""
        check_num_blocks(num_blocks)
        config = self.config
        tokens_per_request = 1 + config.speculative_tokens
        self.buffers = StepBuffers(
            bucket_sizes(min(config.max_num_seqs * tokens_per_request, config.max_num_batched_tokens)),
            config.max_num_seqs,
            decode_widths(self._groups, config.max_model_len, tokens_per_request),
            self.device,
            config.poison_memory,
        )
        self.caches = allocate_caches(
            config.model,
            num_blocks,
            config.kv_cache_dtype,
            self.arch.fp8_format,
            self.device,
            config.poison_memory,
            config.num_draft_layers,
        )

    @torch.inference_mode()
    def execute(self, packet: Int32Array) -> StepResult:
        """Run one step.  Raises: WorkerError for a packet that does not fit its header or this run's limits."""
        started = time.perf_counter()
        header = read_header(packet, self.config.max_num_seqs, self.config.max_num_batched_tokens)
        on_host = split_sections(packet, header.shape)
        bucket = self.buffers.bucket_of(header.shape) if _is_decode(header, on_host) else None
        if bucket is None:
            on_device = torch.from_numpy(packet).to(self.device)
            tokens, logprobs, logits = self._run(split_sections(on_device, header.shape))
        else:
            tokens = self._decode(self.buffers.stage(on_host, bucket))[: header.shape.num_requests]
            logprobs, logits = torch.empty(0), torch.empty(0, self.config.model.vocab_size)
        return StepResult(
            generation=header.generation,
            step_id=header.step_id,
            token_ids=tokens.flatten().to(torch.int32).cpu().numpy(),
            logprobs=logprobs.numpy(),
            logits=logits.numpy(),
            elapsed_us=int((time.perf_counter() - started) * 1e6),
        )

    def _decode(self, sections: dict[str, torch.Tensor]) -> torch.Tensor:
        """A padded step in which all requests want tokens: a function of the step buffer's contents alone."""
        step = build_metadata(self.config.model, self.ops, sections)
        streams = self.model.forward(step, self.caches)
        return self._sample(streams, step, sections, torch.arange(len(sections["seq_lens"]), device=self.device))

    def _run(self, sections: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Any step, at its own size: new tokens, log-probabilities and logits, for those requests that want them."""
        step = build_metadata(self.config.model, self.ops, sections)
        streams = self.model.forward(step, self.caches)
        reqs = torch.nonzero(sections["row_kind"] == RowKind.SAMPLE).flatten()
        return self._sample(streams, step, sections, reqs), *self._score(streams, sections)

    def _sample(
        self, streams: torch.Tensor, step: StepMetadata, sections: dict[str, torch.Tensor], reqs: torch.Tensor
    ) -> torch.Tensor:
        """The new tokens and next drafts of the requests `reqs` [S], as [S, 1 + 2k]; see StepResult.token_ids."""
        k = self.config.speculative_tokens
        verify = verify_rows(reqs, sections, k)
        chosen = self._choose(streams, step, sections, verify)
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
        self, streams: torch.Tensor, step: StepMetadata, sections: dict[str, torch.Tensor], verify: VerifyRows
    ) -> torch.Tensor:
        """The model's choice of token after every row of `verify.rows`, [S, 1 + k]."""
        rows, per_row = verify.rows.flatten(), verify.rows.shape[1]
        reqs = verify.reqs.repeat_interleave(per_row)
        chosen = sample(
            self.model.head(streams[rows]),
            sections["temperature"].view(torch.float32)[reqs],
            sections["top_p"].view(torch.float32)[reqs],
            sections["top_k"][reqs],
            sections["seed"][reqs],
            step.positions[rows] + 1,
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

    def _cache_memory_bytes(self) -> int:
        if self.config.kv_cache_memory_bytes is not None:
            return self.config.kv_cache_memory_bytes
        if self.device.type == "cpu":
            free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            return int(free * CPU_CACHE_SHARE) // self.tp.size
        free, total = torch.cuda.mem_get_info(self.device)
        return int(total * self.config.gpu_memory_utilization) - (total - free)


def _is_decode(header: PacketHeader, sections: dict[str, Int32Array]) -> bool:
    """Whether every request of the step goes on by one decode row, or several with drafts, and wants tokens."""
    return header.kind is StepKind.DECODE and bool((sections["row_kind"] == RowKind.SAMPLE).all())


@dataclass(frozen=True)
class RunnerFactory:
    """Builds the runner of a rank inside its process; plain values, so that it can be sent there."""

    config: RunConfig

    def __call__(self, tp: TpInfo, comm: Communicator, device: torch.device) -> ModelRunner:
        return ModelRunner(self.config, tp, comm, device)
