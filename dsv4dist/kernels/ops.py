"""The operations that layers call, as one frozen record chosen once per worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from dsv4dist.errors import UnsupportedError


@dataclass(frozen=True)
class Ops:
    """One callable per operation; signatures and meaning are those of the functions in `kernels.reference`."""

    step_rows: Callable[..., Any]
    rms_norm: Callable[..., Any]
    qr_kv_norm: Callable[..., Any]
    q_rope_kv_insert: Callable[..., Any]
    compress_state: Callable[..., Any]
    compress_store: Callable[..., Any]
    indexer_query: Callable[..., Any]
    select_key_list: Callable[..., Any]
    window_key_list: Callable[..., Any]
    visible_key_list: Callable[..., Any]
    sparse_attention: Callable[..., Any]
    grouped_matmul: Callable[..., Any]
    fp8_weight_linear: Callable[..., Any]
    product_in_fp32: Callable[..., Any]


def reference_ops() -> Ops:
    """The plain torch implementation of every operation."""
    from dsv4dist.kernels.reference import (
        compress,
        fp8_linear,
        grouped_matmul,
        indexer,
        key_lists,
        norm,
        q_rope_kv_insert,
        sparse_attention,
        step_rows,
        vector,
    )

    return Ops(
        step_rows=step_rows.step_rows,
        rms_norm=norm.rms_norm,
        qr_kv_norm=norm.qr_kv_norm,
        q_rope_kv_insert=q_rope_kv_insert.q_rope_kv_insert,
        compress_state=compress.compress_state,
        compress_store=compress.compress_store,
        indexer_query=indexer.indexer_query,
        select_key_list=indexer.select_key_list,
        window_key_list=key_lists.window_key_list,
        visible_key_list=key_lists.visible_key_list,
        sparse_attention=sparse_attention.sparse_attention,
        grouped_matmul=grouped_matmul.grouped_matmul,
        fp8_weight_linear=fp8_linear.fp8_weight_linear,
        product_in_fp32=vector.product_in_fp32,
    )


def triton_ops() -> Ops:
    """The Triton implementation of every operation.  Raises: UnsupportedError where there is no triton."""
    try:
        from dsv4dist.kernels._triton import (
            compress,
            fp8_linear,
            grouped_matmul,
            indexer_logits,
            indexer_query,
            key_lists,
            norm,
            q_rope_kv_insert,
            sparse_decode,
            step_rows,
            vector,
        )
    except ImportError as error:
        raise UnsupportedError(
            f"--kernels triton: {error}; PyTorch's GPU builds bring triton, `pip install triton` is for CPUs only"
        ) from None

    return Ops(
        step_rows=step_rows.step_rows,
        rms_norm=norm.rms_norm,
        qr_kv_norm=norm.qr_kv_norm,
        q_rope_kv_insert=q_rope_kv_insert.q_rope_kv_insert,
        compress_state=compress.compress_state,
        compress_store=compress.compress_store,
        indexer_query=indexer_query.indexer_query,
        select_key_list=indexer_logits.select_key_list,
        window_key_list=key_lists.window_key_list,
        visible_key_list=key_lists.visible_key_list,
        sparse_attention=sparse_decode.sparse_attention,
        grouped_matmul=grouped_matmul.grouped_matmul,
        fp8_weight_linear=fp8_linear.fp8_weight_linear,
        product_in_fp32=vector.product_in_fp32,
    )


TRITON_HEAD_DIM = 512
"""The only width of attention heads that the Triton kernels know."""


def choose_kernels(kernels: str, device_type: str, head_dim: int) -> tuple[str, str]:
    """(implementation, reason) for the user's `--kernels`.  Raises: UnsupportedError naming what is available."""
    missing = None
    if device_type == "cpu":
        missing = "there is no GPU"
    elif head_dim != TRITON_HEAD_DIM:
        missing = f"the Triton kernels know head_dim {TRITON_HEAD_DIM} only, the model has {head_dim}"
    if kernels == "aiter":
        raise UnsupportedError("--kernels aiter: this version has no AITER kernels; use auto, reference or triton")
    if kernels == "triton" and missing is not None:
        raise UnsupportedError(f"--kernels triton: {missing}; use auto or reference")
    if kernels == "reference":
        return "reference", "asked for"
    if missing is not None:
        return "reference", missing
    return "triton", "asked for" if kernels == "triton" else "the device is a GPU"


def choose_ops(kernels: str, device_type: str, head_dim: int) -> Ops:
    """The record for the user's `--kernels` on a device (`cpu` or `cuda`).  Raises: UnsupportedError."""
    name, _ = choose_kernels(kernels, device_type, head_dim)
    return triton_ops() if name == "triton" else reference_ops()


def chosen_ops(kernels: str = "auto") -> list[tuple[str, str, str]]:
    """(operation, implementation, reason) rows of what runs on this machine, for people to read."""
    import torch

    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    name, why = choose_kernels(kernels, device_type, TRITON_HEAD_DIM)
    return [(field.name, name, why) for field in fields(Ops)]
