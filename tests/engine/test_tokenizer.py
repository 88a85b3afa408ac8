"""Oracle: a byte-level vocabulary, in which a token's bytes are known without the tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from dsv4dist.engine.tokenizer import Tokenizer, encode_prompt, load_tokenizer
from dsv4dist.errors import CheckpointError, RequestError

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
BOS, EOS = "<bos>", "<eos>"


def byte_of_symbols() -> dict[str, int]:
    """GPT-2's table: printable bytes stand for themselves, the others for characters from 256 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(rest)}


def make_backend() -> Backend:
    backend = Backend(models.BPE(vocab={symbol: i for i, symbol in enumerate(ALPHABET)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(BOS, special=True), AddedToken(EOS, special=True)])
    return backend


BACKEND = make_backend()
TOKENIZER = Tokenizer(BACKEND)
BYTES = byte_of_symbols()
ID_OF_BYTE = {BYTES[symbol]: i for i, symbol in enumerate(ALPHABET)}


def save(directory: Path, **config: object) -> Path:
    BACKEND.save(str(directory / "tokenizer.json"))
    if config:
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@given(st.text())
def test_round_trip(text: str) -> None:
    if any(0xD800 <= ord(c) <= 0xDFFF for c in text):
        with pytest.raises(RequestError, match="UTF-8"):
            TOKENIZER.encode(text)
        return
    ids = TOKENIZER.encode(text)
    if BOS not in text and EOS not in text:
        assert ids == [ID_OF_BYTE[byte] for byte in text.encode()]
        assert TOKENIZER.decode(ids) == text


@settings(max_examples=300)
@given(st.lists(st.lists(st.integers(0, len(ALPHABET) + 1), max_size=3), max_size=12))
def test_pieces_put_together_are_the_text(steps: list[list[int]]) -> None:
    stream = TOKENIZER.stream()
    pieces = [stream.push(step) for step in steps]
    raw = bytes(BYTES[ALPHABET[i]] for step in steps for i in step if i < len(ALPHABET))
    assert "".join(pieces) + stream.finish() == raw.decode("utf-8", errors="replace")
    assert stream.finish() == ""


def test_no_piece_holds_half_a_character() -> None:
    text = "naïve 雪 🙂 ok"
    stream = TOKENIZER.stream()
    pieces = [stream.push([ID_OF_BYTE[byte]]) for byte in text.encode()]
    assert [piece for piece in pieces if piece] == list(text)
    assert stream.finish() == ""


def test_special_tokens_are_not_text() -> None:
    bos, eos = BACKEND.token_to_id(BOS), BACKEND.token_to_id(EOS)
    assert TOKENIZER.decode([bos, ID_OF_BYTE[ord("a")], eos]) == "a"


def test_beginning_of_sequence_only_where_the_files_ask_for_it(tmp_path: Path) -> None:
    bos, a = BACKEND.token_to_id(BOS), ID_OF_BYTE[ord("a")]
    wanted = {"content": BOS, "__type": "AddedToken"}
    cases: list[tuple[dict[str, object], list[int]]] = [
        ({}, [a]),
        ({"add_bos_token": False, "bos_token": BOS}, [a]),
        ({"add_bos_token": True, "bos_token": BOS}, [bos, a]),
        ({"add_bos_token": True, "bos_token": wanted}, [bos, a]),
    ]
    for config, ids in cases:
        tokenizer = load_tokenizer(save(tmp_path, **config))
        assert tokenizer is not None
        assert tokenizer.encode("a") == ids
        assert tokenizer.encode(BOS + "a") == [bos, a]


def test_missing_file_is_enough_for_token_ids(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None
    with pytest.raises(RequestError, match=r"tokenizer\.json is missing.*--prompt-ids"):
        encode_prompt(None, "text", tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ('{"add_bos_token": true, "bos_token": "<other>"}', "'<other>' is not in tokenizer.json"),
        ('{"add_bos_token": true}', "bos_token None"),
        ("[1]", "not readable"),
        ("{", "not readable"),
    ],
)
def test_unusable_settings_are_named(tmp_path: Path, config: str, message: str) -> None:
    (save(tmp_path) / "tokenizer_config.json").write_text(config)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert "tokenizer_config.json" in str(caught.value)


def test_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a usable tokenizer"):
        load_tokenizer(tmp_path)
