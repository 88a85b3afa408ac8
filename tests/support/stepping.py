"""Steps of the tests' own choosing: any split of any requests into rows, with the logits of every row."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from dsv4dist.cache.blocks import BlockManager
from dsv4dist.cache.groups import cache_groups
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
