"""The operations that layers call, as one frozen record chosen once per worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from dsv4dist.errors import UnsupportedError


@dataclass(frozen=True)
class Ops:
    """One callable per operation; signatures and meaning are those of the functions in `kernels.reference`."""

    rms_norm: Callable[..., Any]
    qr_kv_norm: Callable[..., Any]
    q_rope_kv_insert: Callable[..., Any]
    compress_state: Callable[..., Any]
    compress_store: Callable[..., Any]
    indexer_query: Callable[..., Any]
    indexer_logits: Callable[..., Any]
    topk_entries: Callable[..., Any]
    window_key_list: Callable[..., Any]
    entry_key_list: Callable[..., Any]
    sparse_attention: Callable[..., Any]


def reference_ops() -> Ops:
    """The plain torch implementation of every operation."""
    from dsv4dist.kernels.reference import compress, indexer, key_lists, norm, q_rope_kv_insert, sparse_attention

    return Ops(
        rms_norm=norm.rms_norm,
        qr_kv_norm=norm.qr_kv_norm,
        q_rope_kv_insert=q_rope_kv_insert.q_rope_kv_insert,
        compress_state=compress.compress_state,
        compress_store=compress.compress_store,
        indexer_query=indexer.indexer_query,
        indexer_logits=indexer.indexer_logits,
        topk_entries=indexer.topk_entries,
        window_key_list=key_lists.window_key_list,
        entry_key_list=key_lists.entry_key_list,
        sparse_attention=sparse_attention.sparse_attention,
    )


def choose_ops(kernels: str) -> Ops:
    """The record for the user's `--kernels`.  Raises: UnsupportedError naming what is available."""
    if kernels in ("auto", "reference"):
        return reference_ops()
    raise UnsupportedError(f"--kernels {kernels}: this version has only the reference kernels; use auto or reference")


def chosen_ops(kernels: str = "auto") -> list[tuple[str, str, str]]:
    """(operation, implementation, reason) rows of what `choose_ops` takes, for people to read."""
    ops = choose_ops(kernels)
    why = "asked for" if kernels == "reference" else "the only implementation in this version"
    return [(field.name, getattr(ops, field.name).__module__.split(".")[2], why) for field in fields(Ops)]
