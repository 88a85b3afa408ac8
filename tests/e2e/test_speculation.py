"""Speculative decoding on the tiny model: outputs as without it, whatever is proposed and accepted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dsv4dist import SamplingParams
from dsv4dist.cache.blocks import BlockManager
from dsv4dist.cache.groups import STATE, cache_groups
from dsv4dist.config.model import LayerKind
from dsv4dist.engine.request import Request
from dsv4dist.engine.scheduler import ScheduledRequest
from dsv4dist.engine.step_plan import build_step_plan
from dsv4dist.kernels.reference.pages import read_entries
from dsv4dist.workers.executor import NO_TOKEN
from tests.support.compare import random_tokens

MAX_DRAFTS = 11


class Verifier:
    """Decodes one sequence by verification steps of the test's own choosing, past the engine's scheduler."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        config = engine.config
        groups = cache_groups(config.model, config.kv_cache_dtype, config.num_draft_layers)
        self.blocks = BlockManager(groups, engine.report.num_cache_blocks)

    def start(self, prompt: list[int]) -> Request:
        request = Request("", list(prompt), SamplingParams(), 0, 1000)
        request.output_token_ids += self._run(request, len(prompt))
        request.num_computed = len(prompt)
        return request

    def verify(self, request: Request, drafts: list[int]) -> list[int]:
        """Run the newest token and `drafts`; appends what was chosen and returns it."""
        request.draft_token_ids = drafts
        new = self._run(request, 1 + len(drafts))
        request.draft_token_ids = []
        request.output_token_ids += new
        request.num_computed += len(new)
        self.blocks.release_passed(request.tables, request.num_computed)
        return new

    def finish(self, request: Request) -> None:
        self.blocks.free(request.tables)

    def _run(self, request: Request, num_tokens: int) -> list[int]:
        assert self.blocks.extend(request.tables, request.num_computed + num_tokens)
        packet = build_step_plan([ScheduledRequest(request, num_tokens)], self.engine._executor.generation, 0).pack()
        words = self.engine._executor.execute(packet).token_ids
        assert len(words) == 1 + 2 * MAX_DRAFTS
        return [int(token) for token in words[: 1 + MAX_DRAFTS] if token != NO_TOKEN]


@pytest.fixture(scope="module")
def drafting(engine: Callable[..., Any], checkpoint: Callable[..., Path]) -> Any:
    return engine(checkpoint("tiny"), speculative_tokens=MAX_DRAFTS, poison_memory=True)


@pytest.fixture(scope="module")
def plain(engine: Callable[..., Any], checkpoint: Callable[..., Path]) -> Any:
    return engine(checkpoint("tiny"))


@pytest.mark.parametrize("length", [1, 2, 125, 128])
@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 6, 8, 12])
def test_any_acceptance_equals_plain_decode(drafting: Any, plain: Any, length: int, width: int) -> None:
    """Widths up to 12, starts at every residue of both ratios, and every count of right drafts in turn."""
    prompt = random_tokens(length)
    (whole,) = plain.generate([prompt], SamplingParams(max_tokens=26, ignore_eos=True))
    truth = whole.token_ids
    verifier = Verifier(drafting)
    request = verifier.start(prompt)
    assert request.output_token_ids == truth[:1]
    right = 0
    while len(request.output_token_ids) + width < len(truth):
        at = len(request.output_token_ids)
        drafts = truth[at : at + right] + [(token + 1) % 512 for token in truth[at + right : at + width - 1]]
        assert verifier.verify(request, drafts[: width - 1]) == truth[at : at + min(right, width - 1) + 1]
        right = (right + 1) % width
    verifier.finish(request)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_outputs_are_those_without_drafts(
    engine: Callable[..., Any], plain: Any, checkpoint: Callable[..., Path], count: int
) -> None:
    speculative = engine(checkpoint("tiny"), speculative_tokens=count, poison_memory=True)
    prompts = [random_tokens(length) for length in (1, 5, 130, 300)]
    for params in (
        SamplingParams(max_tokens=24, ignore_eos=True),
        SamplingParams(max_tokens=24, temperature=0.9, top_p=0.9, seed=5, ignore_eos=True),
    ):
        expected = [output.token_ids for output in plain.generate(prompts, params)]
        assert [output.token_ids for output in speculative.generate(prompts, params)] == expected
    accepted, proposed = speculative.acceptance()
    assert 0 <= accepted <= proposed
    assert proposed > 0


def test_drafts_come_from_the_draft_layer(drafting: Any) -> None:
    """Against the formula on float64 arrays: the layer's own projections, one window-only layer, the shared head."""
    from tests.support import oracle

    prompt = random_tokens(40)
    verifier = Verifier(drafting)
    request = Request("", prompt, SamplingParams(), 0, 1000)
    assert verifier.blocks.extend(request.tables, len(prompt))
    packet = build_step_plan([ScheduledRequest(request, len(prompt))], drafting._executor.generation, 0).pack()
    words = drafting._executor.execute(packet).token_ids
    params = oracle.read_parameters(drafting.config.directory)
    expected = oracle.draft_logits(prompt, int(words[0]), params, drafting.config.model)
    order = np.argsort(expected)
    assert expected[order[-1]] - expected[order[-2]] > 1e-3, "choose another prompt: the two best drafts nearly tie"
    assert words[1 + MAX_DRAFTS] == order[-1]
    verifier.finish(request)


@pytest.mark.parametrize("width", [1, 4, 5, 8, 12])
def test_caches_after_rejected_drafts_are_those_of_plain_decode(drafting: Any, plain: Any, width: int) -> None:
    """Every row of every group that a later token reads, against one-token decode of the accepted tokens."""
    prompt = random_tokens(123)
    (whole,) = plain.generate([prompt], SamplingParams(max_tokens=24, ignore_eos=True))
    truth = whole.token_ids
    rows = []
    for drafts_wanted in (True, False):
        verifier = Verifier(drafting)
        request = verifier.start(prompt)
        right = 0
        while len(request.output_token_ids) < 12:
            at = len(request.output_token_ids)
            drafts = truth[at : at + right] + [(token + 1) % 512 for token in truth[at + right : at + width - 1]]
            verifier.verify(request, drafts[: width - 1] if drafts_wanted else [])
            right = (right + 1) % width
        while drafts_wanted is False and len(request.output_token_ids) < len(rows[0][0]):
            verifier.verify(request, [])
        rows.append((list(request.output_token_ids), read_caches(drafting, request)))
        verifier.finish(request)
    (tokens, speculative), (plain_tokens, one_by_one) = rows
    assert tokens == plain_tokens
    assert speculative.keys() == one_by_one.keys()
    for name, values in speculative.items():
        assert np.isfinite(values).all(), name
        assert np.abs(values - one_by_one[name]).max() < 1e-5, name


def read_caches(engine: Any, request: Request) -> dict[str, np.ndarray]:
    """The rows of the main layers' caches that tokens after the computed ones read, by layer and cache."""
    model, done = engine.config.model, request.num_computed
    found = {}
    for layer, (kind, caches) in enumerate(zip(model.layer_kinds, engine._executor.runner.caches, strict=False)):
        wanted = {"window": ("window", range(max(0, done - model.sliding_window + 1), done))}
        if kind.compress_ratio > 1:
            wanted["entries"] = ("compressed", range(done // kind.compress_ratio))
            first = (done // kind.compress_ratio - kind.overlap + 1) * kind.compress_ratio
            wanted["state"] = (STATE[kind], range(max(0, first), done))
        if kind is LayerKind.CSA:
            wanted["index_keys"], wanted["index_state"] = wanted["entries"], wanted["state"]
        for name, (group, positions) in wanted.items():
            cache, table = getattr(caches, name), request.tables[group]
            slots = [
                table.blocks[at // cache.block_size - table.first_block] * cache.block_size + at % cache.block_size
                for at in positions
            ]
            found[f"layer {layer} {name}"] = read_entries(cache, torch.tensor(slots, dtype=torch.int64)).float().numpy()
    return found
