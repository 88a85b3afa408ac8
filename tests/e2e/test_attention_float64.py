"""The engine in fp32 against the float64 oracle: single layers of each kind, all layers of each kind, and mixed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsv4dist.config.model import LayerKind, load_model_config
from tests.support import oracle
from tests.support.compare import assert_logits_close, random_tokens

# Past the window, past index_topk entries of CSA, and two entries of HCA with tokens after them.
LENGTH = 300
TOLERANCE = 1e-4


def compare(directory: Path, engine: Any, lengths: tuple[int, ...]) -> None:
    config, params = load_model_config(directory), oracle.read_parameters(directory)
    token_ids = random_tokens(max(lengths), vocab_size=config.vocab_size)
    gaps = oracle.Gaps(len(token_ids))
    expected = oracle.model_logits(token_ids, params, config, gaps)
    assert np.std(expected) > 0.3, "logits this flat hide errors"
    # Attention is causal: a shorter prompt has the first rows of the longest one's logits.
    scored = engine(directory).score([token_ids[:length] for length in lengths], return_logits=True)
    for length, one in zip(lengths, scored, strict=True):
        assert_logits_close(one.logits, expected[:length], lambda: gaps.smallest, TOLERANCE, f"length {length}")


@pytest.mark.parametrize("num_hash_layers", [0, 1], ids=["router", "hash"])
@pytest.mark.parametrize("kind", list(LayerKind), ids=lambda kind: kind.value)
def test_a_single_layer(
    kind: LayerKind, num_hash_layers: int, checkpoint: Callable[..., Path], engine: Callable[..., Any]
) -> None:
    ratio = 0 if kind is LayerKind.SWA else kind.compress_ratio
    layout = {"compress_ratios": [ratio], "num_hash_layers": num_hash_layers}
    directory = checkpoint("tiny", seed=5, overrides=layout)
    assert load_model_config(directory).layer_kinds == (kind,)
    compare(directory, engine, (1, 4, 129, LENGTH))


@pytest.mark.parametrize("preset", ["tiny-swa", "tiny-csa", "tiny-hca", "tiny"])
def test_all_layers(preset: str, checkpoint: Callable[..., Path], engine: Callable[..., Any]) -> None:
    compare(checkpoint(preset, seed=6), engine, (5, 128, LENGTH))
