"""Steps of the tests' own choosing: any requests, rows and packets, past the scheduler."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from dsv4dist.cache.blocks import BlockManager
from dsv4dist.cache.groups import cache_groups
from dsv4dist.cache.pool import cache_tensors
from dsv4dist.engine.request import Request, SamplingParams
from dsv4dist.engine.scheduler import ScheduledRequest
from dsv4dist.engine.step_plan import build_step_plan
from dsv4dist.workers.packet import RowKind

Step = Sequence[tuple[int, int]]
"""Rows of one step: (sequence, number of its next tokens), in batch order."""


class Stepper:
    """Drives an engine's executor past its scheduler. Sequences may be dropped and begun again, on reused blocks."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        groups = cache_groups(engine.config.model, engine.config.kv_cache_dtype, engine.config.num_draft_layers)
        self.blocks = BlockManager(groups, engine.report.num_cache_blocks)
        self.step_ids = itertools.count()

    def run(
        self, sequences: Sequence[list[int]], steps: Sequence[Step], num_prompt: Sequence[int] | None = None
    ) -> list[np.ndarray]:
        """Run `steps` and return the logits of each sequence, float32 [tokens run, vocab].

        num_prompt  tokens of each sequence that count as its prompt (default: all); the others come as decode rows
        """
        prompts = num_prompt if num_prompt is not None else [len(sequence) for sequence in sequences]
        requests = []
        for sequence, prompt in zip(sequences, prompts, strict=True):
            request = Request("", sequence[:prompt], SamplingParams(), 0, len(sequence), RowKind.SCORE_LOGITS)
            request.output_token_ids = sequence[prompt:]
            requests.append(request)
        for step in steps:
            self._run_step([ScheduledRequest(requests[which], count) for which, count in step])
        for request in requests:
            self.blocks.free(request.tables)
        return [np.concatenate(request.logits) for request in requests]

    def _run_step(self, chosen: list[ScheduledRequest]) -> None:
        executor = self.engine._executor
        for one in chosen:
            assert self.blocks.extend(one.request.tables, one.request.num_computed + one.num_tokens)
        plan = build_step_plan(chosen, executor.generation, next(self.step_ids))
        logits = executor.execute(plan.pack()).logits
        for one in chosen:
            one.request.logits.append(logits[: one.num_tokens].copy())
            logits = logits[one.num_tokens :]
            one.request.num_computed += one.num_tokens
            self.blocks.release_passed(one.request.tables, one.request.num_computed)
        assert len(logits) == 0


class Decoder:
    """Generates from several requests past an engine's scheduler: any of them in a step, several steps in a packet."""

    def __init__(self, engine: Any, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> None:
        self.engine = engine
        groups = cache_groups(engine.config.model, engine.config.kv_cache_dtype, engine.config.num_draft_layers)
        self.blocks = BlockManager(groups, engine.report.num_cache_blocks)
        self.step_ids = itertools.count()
        longest = engine.config.max_model_len
        self.requests = [
            Request(str(i), prompt, one, one.seed or i, longest, RowKind.SAMPLE)
            for i, (prompt, one) in enumerate(zip(prompts, params, strict=True))
        ]

    def prefill(self, chunk: int = 1024) -> None:
        """Compute every prompt, one request after the other, and sample its first token."""
        for which, request in enumerate(self.requests):
            while left := len(request.prompt_token_ids) - request.num_computed:
                self.step([which], rows=min(chunk, left))

    def step(self, which: Sequence[int], num_steps: int = 1, rows: int = 1) -> None:
        """Run `num_steps` steps of these requests in one packet, and take their tokens."""
        executor, chosen = self.engine._executor, [ScheduledRequest(self.requests[i], rows) for i in which]
        for request, _ in chosen:
            assert self.blocks.extend(request.tables, request.num_computed + rows + num_steps - 1)
        plan = replace(build_step_plan(chosen, executor.generation, next(self.step_ids)), num_steps=num_steps)
        executor.submit(plan.pack(), num_steps)
        for _ in range(num_steps):
            tokens = iter(executor.collect().token_ids.tolist())
            for (request, _), row_kind in zip(chosen, plan.sections["row_kind"].tolist(), strict=True):
                request.num_computed += rows
                if row_kind == RowKind.SAMPLE:
                    request.output_token_ids.append(next(tokens))
        for request, _ in chosen:
            self.blocks.release_passed(request.tables, request.num_computed)

    @property
    def outputs(self) -> list[list[int]]:
        """The tokens of every request so far."""
        return [list(request.output_token_ids) for request in self.requests]

    def caches(self) -> list[torch.Tensor]:
        """Copies of all cache memory, as bytes on the host."""
        return [one.view(torch.uint8).cpu().clone() for one in cache_tensors(self.engine._executor.runner.caches)]
