"""The engine against transformers, live, in fp32, for every kind of layer, in both checkpoint formats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsv4dist import SamplingParams
from tests.support import transformers_oracle as hf
from tests.support.compare import assert_logits_close, random_tokens

LENGTHS = (1, 3, 4, 5, 127, 128, 129, 255, 256, 300, 515)
NEW_TOKENS = 16
TOLERANCE = 1e-3
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)

SAVED = {
    "swa": [hf.SLIDING, hf.SLIDING],
    "csa": [hf.CSA, hf.CSA],
    "hca": [hf.HCA, hf.HCA],
    "mixed": [hf.SLIDING, hf.CSA, hf.HCA, hf.CSA],
}
PRESETS = {"swa": "tiny-swa", "csa": "tiny-csa", "hca": "tiny-hca", "mixed": "tiny"}
SUBJECTS = [f"{source}-{kind}" for source in ("saved", "release") for kind in SAVED]


@dataclass(frozen=True)
class Run:
    """Both sides' results of one model, by prompt length."""

    ours: dict[int, np.ndarray]  # logits of prompt and new tokens
    tokens: dict[int, list[int]]
    theirs: dict[int, hf.Scored]  # of our tokens


def prompts_for(vocab_size: int) -> dict[int, list[int]]:
    return {length: random_tokens(length, vocab_size=vocab_size) for length in LENGTHS}


@pytest.fixture(scope="module")
def subject_directory(
    request: pytest.FixtureRequest, checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    source, kind = request.param.split("-")
    if source == "release":
        return checkpoint(PRESETS[kind])
    directory = tmp_path_factory.mktemp(kind)
    hf.random_model(SAVED[kind], seed=2, num_hash_layers=1).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def run(subject_directory: Path, engine: Callable[..., Any]) -> Run:
    ours = engine(subject_directory)
    model = hf.load_model(subject_directory)
    prompts = prompts_for(model.config.vocab_size)
    outputs = ours.generate(list(prompts.values()), GREEDY)
    assert [output.error for output in outputs] == [None] * len(outputs)
    tokens = {length: output.token_ids for length, output in zip(prompts, outputs, strict=True)}
    whole = {length: prompts[length] + tokens[length] for length in LENGTHS}
    scored = ours.score(list(whole.values()), return_logits=True)
    return Run(
        ours={length: one.logits for length, one in zip(whole, scored, strict=True)},
        tokens=tokens,
        theirs={length: hf.score(model, ids) for length, ids in whole.items()},
    )


@pytest.mark.parametrize("subject_directory", SUBJECTS, indirect=True, scope="module")
@pytest.mark.parametrize("length", LENGTHS)
class TestAgainstTransformers:
    def test_logits(self, run: Run, length: int) -> None:
        theirs = run.theirs[length]
        assert np.std(theirs.logits) > 0.3, "logits this flat hide errors"
        assert_logits_close(run.ours[length], theirs.logits, lambda: theirs.gaps, TOLERANCE)

    def test_greedy_tokens(self, run: Run, length: int) -> None:
        # Each of our tokens is their best one after the prompt and our tokens before it: so both sequences are equal.
        best = np.argmax(run.theirs[length].logits[length - 1 : -1], axis=-1)
        assert run.tokens[length] == best.tolist()
        assert len(best) == NEW_TOKENS


def test_greedy_tokens_equal_a_loop_of_whole_forwards(checkpoint: Callable[..., Path], engine: Any) -> None:
    directory = checkpoint("tiny")
    model = hf.load_model(directory)
    for length in (5, 129):
        prompt = prompts_for(model.config.vocab_size)[length]
        (output,) = engine(directory).generate([prompt], GREEDY)
        assert output.token_ids == hf.greedy(model, prompt, NEW_TOKENS)


def test_release_format_and_save_pretrained_give_the_same(
    checkpoint: Callable[..., Path], engine: Any, tmp_path: Path
) -> None:
    release = checkpoint("tiny")
    model = hf.load_model(release)
    model.save_pretrained(tmp_path)
    prompts = [prompts_for(model.config.vocab_size)[length] for length in (5, 300)]
    from_release = engine(release).score(prompts, return_logits=True)
    from_saved = engine(tmp_path).score(prompts, return_logits=True)
    for one, other in zip(from_release, from_saved, strict=True):
        np.testing.assert_array_equal(one.logits, other.logits)


@pytest.mark.parametrize("preset", sorted(PRESETS.values()))
def test_a_quantised_checkpoint_equals_its_dequantised_self(
    preset: str, checkpoint: Callable[..., Path], engine: Any, tmp_path: Path
) -> None:
    from dsv4dist.checkpoint.random_checkpoint import dequantise_checkpoint

    quantised = checkpoint(preset, quant=True)
    dequantise_checkpoint(quantised, tmp_path)
    model = hf.load_model(tmp_path)
    prompts = [prompts_for(model.config.vocab_size)[length] for length in (5, 129, 300)]
    from_quantised = engine(quantised).score(prompts, return_logits=True)
    from_floats = engine(tmp_path).score(prompts, return_logits=True)
    for prompt, one, other in zip(prompts, from_quantised, from_floats, strict=True):
        np.testing.assert_array_equal(one.logits, other.logits)
        theirs = hf.score(model, prompt)
        assert_logits_close(one.logits, theirs.logits, lambda theirs=theirs: theirs.gaps, TOLERANCE)
