"""A byte-level tokenizer.json for random checkpoints: any text encodes, and every token id has a text."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from dsv4dist.config.model import ModelConfig

TOKENIZER_FILES = ["tokenizer.json", "tokenizer_config.json"]
_NUM_BYTES = 256
_MERGED_LETTERS = "etaoinshrdlcumwf"


def write_tokenizer(directory: Path, config: ModelConfig) -> bool:
    """Write TOKENIZER_FILES for ids below vocab_size; False, and nothing written, if the bytes do not fit in there.

    Special tokens take the ids of config.json, then come the bytes, pairs of frequent letters, and unused words.
    """
    specials = {}
    if config.bos_token_id is not None:
        specials[config.bos_token_id] = "<bos>"
    for number, token in enumerate(config.eos_token_ids):
        specials.setdefault(token, f"<eos{number or ''}>")
    if any(token >= config.vocab_size for token in specials) or config.vocab_size < len(specials) + _NUM_BYTES:
        return False
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(first, second) for first in _MERGED_LETTERS for second in _MERGED_LETTERS]
    merges = pairs[: config.vocab_size - len(specials) - _NUM_BYTES]
    texts = iter([*alphabet, *(first + second for first, second in merges)])
    vocab = {
        text: token
        for token in range(config.vocab_size)
        for text in [specials.get(token) or next(texts, f"<unused{token}>")]
    }
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials.values()])
    tokenizer.save(str(directory / TOKENIZER_FILES[0]))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config.max_position_embeddings}
    if config.bos_token_id is not None:
        names["bos_token"] = specials[config.bos_token_id]
    if config.eos_token_ids:
        names["eos_token"] = specials[config.eos_token_ids[0]]
    (directory / TOKENIZER_FILES[1]).write_text(json.dumps(names, indent=1) + "\n", encoding="utf-8")
    return True
