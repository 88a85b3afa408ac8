"""Prompts as users give them, to token ids that the model has."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from pathlib import Path

from dsv4dist.engine.tokenizer import Tokenizer, encode_prompt
from dsv4dist.errors import RequestError

Prompt = str | Sequence[int]


def check_list(what: str, prompts: object) -> None:
    """Refuse one prompt where several are expected.  Raises: RequestError."""
    if isinstance(prompts, str):
        raise RequestError(f"{what} is a text; give a list of texts or of lists of token ids")
    if isinstance(prompts, Sequence) and any(isinstance(one, int) for one in prompts):
        raise RequestError(f"{what} is a list of token ids; give a list of such lists or of texts")


def prompt_ids(prompt: Prompt, tokenizer: Tokenizer | None, directory: Path, vocab_size: int) -> list[int]:
    """Token ids of a text, or the given ones checked.

    directory  of the model, for the message when it has no tokenizer

    Raises: RequestError for a text without a tokenizer, an empty prompt, or an id that is none of the vocabulary's.
    """
    if isinstance(prompt, str):
        tokens = encode_prompt(tokenizer, prompt, directory)
    else:
        tokens = [_token_id(token) for token in prompt]
    if not tokens:
        raise RequestError("the prompt is empty; give at least one token")
    outside = next((token for token in tokens if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise RequestError(f"token id {outside} is out of range; the vocabulary has ids 0 to {vocab_size - 1}")
    return tokens


def _token_id(token: object) -> int:
    try:
        if isinstance(token, bool):
            raise TypeError
        return operator.index(token)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise RequestError(f"token id {token!r} is not an integer") from None
