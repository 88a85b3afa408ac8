"""Each prefill token's rows of the gathered workspace, in Triton (attention spec 4.4)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4dist.errors import ShapeError
from dsv4dist.kernels._triton.checks import check_dense, check_integers, power_of_2_up_to
from dsv4dist.kernels._triton.compile_spec import CompileSpec, spec
from dsv4dist.kernels.reference.combine_indices import WIDTH_MULTIPLE

MAX_BLOCK = 1024
TILE = 2048


@triton.jit
def _combine_kernel(
    selected_ptr, req_ptr, positions_ptr, visible_ptr, seq_lens_ptr, gather_lens_ptr, left_ptr, right_ptr, indices_ptr,
    lens_ptr, stride_selected, num_rows, top_k, window, max_image, num_entries, rows_per_request, out_width,
    SELECTED: tl.constexpr, IMAGES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK columns of ROWS rows of the combined list."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    wanted = row < num_rows
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    req = tl.load(req_ptr + row, mask=wanted, other=0).to(tl.int64)
    position = tl.load(positions_ptr + row, mask=wanted, other=0).to(tl.int64)
    visible = tl.load(visible_ptr + row, mask=wanted, other=0).to(tl.int64)
    seq = tl.load(seq_lens_ptr + req, mask=wanted, other=0).to(tl.int64)
    gather_start = seq - tl.load(gather_lens_ptr + req, mask=wanted, other=0)
    reach = tl.zeros((ROWS,), tl.int64) + window - 1
    last = position
    if IMAGES:
        reach = tl.maximum(reach, tl.load(left_ptr + row, mask=wanted, other=0).to(tl.int64))
        last += tl.load(right_ptr + row, mask=wanted, other=0)
    start = tl.maximum(tl.maximum(position - reach, 0), gather_start)
    num_window = tl.maximum(tl.minimum(last + 1, seq) - start, 0)
    num_selected = tl.minimum(tl.maximum(visible, 0), top_k)
    base = (req * rows_per_request)[:, None]
    is_selected = column[None, :] < num_selected[:, None]
    if SELECTED:
        entry_ptr = selected_ptr + row.to(tl.int64)[:, None] * stride_selected + column[None, :]
        entry = tl.load(entry_ptr, mask=wanted[:, None] & is_selected, other=-1).to(tl.int64)
    else:
        entry = tl.broadcast_to(column.to(tl.int64)[None, :], is_selected.shape)
    entry = tl.where((entry >= 0) & (entry < num_entries), base + entry, -1)
    behind = column[None, :] - num_selected[:, None]
    token = base + num_entries + (start - gather_start)[:, None] + behind
    in_window = (behind >= 0) & (behind < tl.minimum(num_window, window + max_image)[:, None])
    value = tl.where(is_selected, entry, tl.where(in_window, token, -1))
    out_ptr = indices_ptr + row.to(tl.int64)[:, None] * out_width + column[None, :]
    tl.store(out_ptr, value.to(tl.int32), mask=wanted[:, None] & (column < out_width)[None, :])
    if tl.program_id(1) == 0:
        tl.store(lens_ptr + row, (num_selected + num_window).to(tl.int32), mask=wanted)


def combine_indices(
    selected: torch.Tensor | None,
    token_to_req: torch.Tensor,
    positions: torch.Tensor,
    visible_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor,
    top_k: int,
    window: int,
    num_entries: int,
    rows_per_request: int,
    left_visible: torch.Tensor | None = None,
    right_visible: torch.Tensor | None = None,
    max_image: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each prefill token's rows of the gathered workspace: its selected entries, then its window (spec 4.4).

        selected       [n, >= top_k] int32 or int64 entries, the valid ones first; None = entries 0, 1, 2, ...
        token_to_req, positions, visible_lens  [n] int32 or int64: request of the chunk, absolute position, complete
                       entries there
        seq_lens, gather_lens  [requests] int32 or int64: tokens of the request, and how many of the last are gathered
        num_entries, rows_per_request  workspace rows for entries, and for all of a request
        left_visible, right_visible, max_image  [n] tokens of the same image that are visible, given together
    Returns int32 indices [n, round_up(top_k + window + max_image, 128)], -1 filled, and int32 lens [n].
    Capture: the launch depends on sizes only.  Raises: ShapeError.
    """
    count = positions.shape[0]
    per_token = {"token_to_req": token_to_req, "positions": positions, "visible_lens": visible_lens}
    if (left_visible is None) != (right_visible is None):
        raise ShapeError("left_visible and right_visible", "both or neither", "one of them")
    if left_visible is not None and right_visible is not None:
        per_token |= {"left_visible": left_visible, "right_visible": right_visible}
    for name, one in per_token.items():
        check_integers(name, one, (count,))
    check_integers("seq_lens", seq_lens, (seq_lens.numel(),))
    check_integers("gather_lens", gather_lens, (seq_lens.numel(),))
    if selected is not None:
        check_dense("selected", selected)
        if selected.shape[0] != count or selected.shape[1] < top_k:
            raise ShapeError("selected", [count, f">= {top_k}"], list(selected.shape))
    out_width = -(-(top_k + window + max_image) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
    indices = torch.empty(count, out_width, dtype=torch.int32, device=positions.device)
    lens = torch.empty(count, dtype=torch.int32, device=positions.device)
    if count == 0:
        return indices, lens
    block = min(MAX_BLOCK, power_of_2_up_to(out_width))
    rows = TILE // block if count >= 1024 else 1
    _combine_kernel[(triton.cdiv(count, rows), triton.cdiv(out_width, block))](
        positions if selected is None else selected, token_to_req, positions, visible_lens, seq_lens, gather_lens,
        left_visible, right_visible, indices, lens, 0 if selected is None else selected.stride(0), count, top_k, window,
        max_image, num_entries, rows_per_request, out_width, SELECTED=selected is not None,
        IMAGES=left_visible is not None, ROWS=rows, BLOCK=block,
    )  # fmt: skip
    return indices, lens


def compile_specs() -> list[CompileSpec]:
    """Flash (512 selected entries), without and with images."""
    signature = {
        **dict.fromkeys(("selected_ptr", "seq_lens_ptr", "gather_lens_ptr", "left_ptr", "right_ptr"), "*i32"),
        **dict.fromkeys(("req_ptr", "positions_ptr", "visible_ptr"), "*i64"),
        **dict.fromkeys(("indices_ptr", "lens_ptr"), "*i32"),
        **dict.fromkeys(("stride_selected", "num_rows", "top_k", "window", "max_image", "num_entries",
                         "rows_per_request", "out_width"), "i32"),
    }  # fmt: skip
    specs = []
    for images in (False, True):
        specs.append(spec(_combine_kernel, f"combine_indices images={images}", signature, num_warps=4,
                          aligned=("out_width",), narrow_because="a row has any number of entries", constexprs={"SELECTED": True, "IMAGES": images, "ROWS": 4, "BLOCK": 512}))  # fmt: skip
    return specs
