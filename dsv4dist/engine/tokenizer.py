"""Text to token ids and back, from the tokenizer.json beside the weights."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dsv4dist.errors import CheckpointError, RequestError

FILE_NAME = "tokenizer.json"
SETTINGS_NAME = "tokenizer_config.json"
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what decoding shows for bytes that are no character yet


class Tokenizer:
    """A model's tokenizer. `bos_token_id` is put before every encoded text unless it is there already; None: never."""

    def __init__(self, backend: Any, bos_token_id: int | None = None) -> None:
        self._backend = backend
        self.bos_token_id = bos_token_id

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the special tokens that the model's files ask for in front.

        Raises: RequestError for a text with lone surrogates, which has no UTF-8."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(f"the prompt has no UTF-8 form: character {error.start + 1} is half of a pair") from None
        ids: list[int] = self._backend.encode(text).ids
        if self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            ids.insert(0, self.bos_token_id)
        return ids

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text of token ids, without special tokens; bytes that form no character become U+FFFD."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=True)
        return text

    def stream(self) -> IncrementalDecoder:
        """A decoder for one request's tokens as they arrive."""
        return IncrementalDecoder(self)


class IncrementalDecoder:
    """Decodes a growing list of tokens; the pieces put together are the text of the whole list.

    A token can end inside a character's bytes, and its text can depend on the token before it. So each piece is what
    a few more tokens add to the text of the last ones shown, and it waits until the text ends in a whole character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.shown = ""
        """All pieces so far."""
        self._ids: list[int] = []
        self._context = 0  # start of the tokens that the next piece's text may depend on
        self._shown = 0  # tokens before this one are in the pieces returned so far

    @property
    def num_tokens(self) -> int:
        """Tokens that it was given."""
        return len(self._ids)

    def push(self, token_ids: Iterable[int]) -> str:
        """Add tokens; returns the text that they complete, which may be empty."""
        self._ids += token_ids
        text = self._pending()
        if not text or text.endswith(_INCOMPLETE):
            return ""
        self._context, self._shown = self._shown, len(self._ids)
        self.shown += text
        return text

    def finish(self) -> str:
        """The rest, in which incomplete characters are U+FFFD; nothing can be added afterwards."""
        text = self._pending()
        self._context = self._shown = len(self._ids)
        self.shown += text
        return text

    def _pending(self) -> str:
        before = self._tokenizer.decode(self._ids[self._context : self._shown])
        return self._tokenizer.decode(self._ids[self._context :])[len(before) :]


def load_tokenizer(directory: Path) -> Tokenizer | None:
    """The tokenizer of a model's directory; None without a tokenizer.json, which is enough for token ids.

    Raises: CheckpointError naming a tokenizer.json or tokenizer_config.json that cannot be used."""
    path = directory / FILE_NAME
    if not path.is_file():
        return None
    from tokenizers import Tokenizer as Backend

    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"{path}: not a usable tokenizer ({error})") from None
    return Tokenizer(backend, _bos_token_id(directory / SETTINGS_NAME, backend))


def encode_prompt(tokenizer: Tokenizer | None, text: str, directory: Path) -> list[int]:
    """Token ids of a text prompt.  Raises: RequestError when the model has no tokenizer."""
    if tokenizer is None:
        raise RequestError(
            f"{directory / FILE_NAME} is missing, so text cannot be read; give token ids: --prompt-ids 1,2,3"
        )
    return tokenizer.encode(text)


def _bos_token_id(path: Path, backend: Any) -> int | None:
    """The id to put in front, where tokenizer_config.json asks for it (`add_bos_token`)."""
    if not path.is_file():
        return None
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        wanted = settings.get("add_bos_token", False)
        token = settings.get("bos_token")
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path}: not readable as a JSON object ({error})") from None
    if not wanted:
        return None
    name = token.get("content") if isinstance(token, dict) else token
    found = backend.token_to_id(name) if isinstance(name, str) else None
    if found is None:
        raise CheckpointError(f"{path}: add_bos_token is set, but bos_token {name!r} is not in {FILE_NAME}")
    return int(found)
