"""RMS norms in Triton (attention spec 1.2, 4.2, 6.4)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4dist.errors import ShapeError
from dsv4dist.kernels._triton.checks import check_rows, power_of_2_up_to
from dsv4dist.kernels._triton.compile_spec import CompileSpec, archs_of, spec
from dsv4dist.kernels._triton.early_launch import early_launch, wait_for_previous
from dsv4dist.kernels._triton.quantise import cast, encode_e4m3, magnitude
from dsv4dist.kernels.paged_cache import Fp8Format
from dsv4dist.kernels.reference.norm_quantise import ACT_FLOOR, ACT_GROUP

MAX_WIDTH = 1 << 15
_GROUP = tl.constexpr(ACT_GROUP)
_FLOOR = tl.constexpr(ACT_FLOOR)
_INFINITY = tl.constexpr(0x7F800000)


@triton.jit
def _load_weight(weight_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """[BLOCK] as stored, 0 beyond WIDTH. Nothing writes it, so it may be asked for before the kernel ahead has ended."""
    channel = tl.arange(0, BLOCK)
    return tl.load(weight_ptr + channel, mask=channel < WIDTH, other=0.0)


@triton.jit
def _load_rows(row_ptr, present, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The rows at `row_ptr` [N] as [N, BLOCK] in fp32; 0 beyond WIDTH and in absent rows."""
    channel = tl.arange(0, BLOCK)
    inside = present[:, None] & (channel < WIDTH)[None, :]
    return tl.load(row_ptr[:, None] + channel[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _normed(x, weight, eps, WIDTH: tl.constexpr):
    """The norm of rows as they were loaded, fp32."""
    return x * tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)[:, None] * weight.to(tl.float32)[None, :]


@triton.jit
def _store_rows(y, out_ptr, row, present, stride_out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    channel = tl.arange(0, BLOCK)
    out_row_ptr = out_ptr + row[:, None] * stride_out + channel[None, :]
    tl.store(out_row_ptr, cast(y, out_ptr.dtype.element_ty), mask=present[:, None] & (channel < WIDTH)[None, :])


@triton.jit
def _rms_norm_kernel(x_ptr, weight_ptr, out_ptr, stride_x, stride_out, num_rows, eps, WIDTH: tl.constexpr,
                     BLOCK: tl.constexpr, HAS_WEIGHT: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    weight = _load_weight(weight_ptr, WIDTH, BLOCK) if HAS_WEIGHT else tl.full((BLOCK,), 1.0, tl.float32)
    wait_for_previous()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    present = row < num_rows
    y = _normed(_load_rows(x_ptr + row * stride_x, present, WIDTH, BLOCK), weight, eps, WIDTH)
    _store_rows(y, out_ptr, row, present, stride_out, WIDTH, BLOCK)


@triton.jit
def _qr_kv_norm_kernel(
    qr_kv_ptr, q_weight_ptr, kv_weight_ptr, qr_ptr, scale_ptr, kv_ptr, stride_x, num_rows, eps,
    Q_WIDTH: tl.constexpr, Q_BLOCK: tl.constexpr, KV_WIDTH: tl.constexpr, KV_BLOCK: tl.constexpr,
    QUANT_MAX: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Both norms of ROWS rows; with QUANT_MAX > 0 the first leaves as fp8 codes with a scale per 128 channels."""
    q_weight = _load_weight(q_weight_ptr, Q_WIDTH, Q_BLOCK)
    kv_weight = _load_weight(kv_weight_ptr, KV_WIDTH, KV_BLOCK)
    wait_for_previous()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    present = row < num_rows
    row_ptr = qr_kv_ptr + row * stride_x
    qr = _load_rows(row_ptr, present, Q_WIDTH, Q_BLOCK)
    kv = _load_rows(row_ptr + Q_WIDTH, present, KV_WIDTH, KV_BLOCK)
    qr = _normed(qr, q_weight, eps, Q_WIDTH)
    kv = _normed(kv, kv_weight, eps, KV_WIDTH)
    _store_rows(kv, kv_ptr, row, present, KV_WIDTH, KV_WIDTH, KV_BLOCK)
    if QUANT_MAX == 0:
        _store_rows(qr, qr_ptr, row, present, Q_WIDTH, Q_WIDTH, Q_BLOCK)
    else:
        GROUPS: tl.constexpr = Q_BLOCK // _GROUP
        grouped = tl.reshape(qr, (ROWS, GROUPS, _GROUP))
        top = tl.max(magnitude(grouped), 2)
        finite = top < _INFINITY
        amax = tl.maximum(top.to(tl.float32, bitcast=True), _FLOOR)
        scale = tl.where(finite, tl.div_rn(amax, tl.full((ROWS, GROUPS), QUANT_MAX, tl.float32)), float("nan"))
        divisor = tl.where(finite, scale, 1.0)[:, :, None]
        ratio = tl.div_rn(grouped, tl.broadcast_to(divisor, (ROWS, GROUPS, _GROUP)))
        code = encode_e4m3(tl.where(finite[:, :, None], ratio, 0.0), QUANT_MAX == 224)
        channel = tl.arange(0, Q_BLOCK)
        qr_row_ptr = qr_ptr + row[:, None] * Q_WIDTH + channel[None, :]
        inside = present[:, None] & (channel < Q_WIDTH)[None, :]
        tl.store(qr_row_ptr, tl.reshape(code, (ROWS, Q_BLOCK)), mask=inside)
        group = tl.arange(0, GROUPS)
        group_ptr = scale_ptr + row[:, None] * (Q_WIDTH // _GROUP) + group[None, :]
        tl.store(group_ptr, scale, mask=present[:, None] & (group < Q_WIDTH // _GROUP)[None, :])


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Scale rows of `x` [..., n] to unit root mean square, times `weight` [n] if given (spec 1.2); fp32 inside.

    x float, channels adjacent, n <= 32768; returns a contiguous tensor of x's shape and dtype, rounded once.
    Capture: the launch depends on sizes only.  Raises: ShapeError.
    """
    width = x.shape[-1] if x.dim() else 0
    rows = x.reshape(-1, width) if width else x
    check_rows("x", rows, (None, None))
    _check_weight("weight", weight, width)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    count = rows.shape[0]
    if count == 0:
        return out
    block = triton.next_power_of_2(width)
    per_program = _rows_per_program(count, block)
    _rms_norm_kernel[(triton.cdiv(count, per_program),)](
        rows, rows if weight is None else weight, out, rows.stride(0), width, count, eps, WIDTH=width, BLOCK=block,
        HAS_WEIGHT=weight is not None, ROWS=per_program, num_warps=_warps(block * per_program),
        **early_launch(x.device),
    )  # fmt: skip
    return out


def qr_kv_norm(
    qr_kv: torch.Tensor, q_weight: torch.Tensor, kv_weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Split `qr_kv` [T, Lq + D] and norm both parts with their weights, in one launch (spec 4.2).

    qr_kv float, any row stride; q_weight [Lq], kv_weight [D] float. Returns contiguous qr [T, Lq] and kv [T, D] of
    qr_kv's dtype, rounded once.  Capture: the launch depends on sizes only.  Raises: ShapeError.
    """
    qr, _, kv = _norm_both(qr_kv, q_weight, kv_weight, eps, None)
    return qr, kv


def qr_kv_norm_quantised(
    qr_kv: torch.Tensor, q_weight: torch.Tensor, kv_weight: torch.Tensor, eps: float, fp8_format: Fp8Format
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`qr_kv_norm` whose qr leaves as fp8 codes, quantised from the fp32 norm per 128 channels (spec 6.2, 6.4).

    Returns qr [T, Lq] in the encoding's dtype, act_scale [T, Lq / 128] fp32 = max(amax, 1e-10) / quant_max, kv [T, D].
    A group that is not finite gets scale NaN and codes 0.  Raises: ShapeError, also when Lq % 128 != 0.
    """
    if q_weight.numel() % ACT_GROUP:
        raise ShapeError("q rank to quantise", f"a multiple of {ACT_GROUP}", q_weight.numel())
    return _norm_both(qr_kv, q_weight, kv_weight, eps, fp8_format)


def _norm_both(
    qr_kv: torch.Tensor, q_weight: torch.Tensor, kv_weight: torch.Tensor, eps: float, fp8_format: Fp8Format | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q_width, kv_width = q_weight.numel(), kv_weight.numel()
    check_rows("qr_kv", qr_kv, (None, q_width + kv_width))
    _check_weight("q_weight", q_weight, q_width)
    _check_weight("kv_weight", kv_weight, kv_width)
    count, device = qr_kv.shape[0], qr_kv.device
    qr = torch.empty(count, q_width, dtype=torch.uint8 if fp8_format else qr_kv.dtype, device=device)
    scale = torch.empty(count, q_width // ACT_GROUP if fp8_format else 0, dtype=torch.float32, device=device)
    kv = torch.empty(count, kv_width, dtype=qr_kv.dtype, device=device)
    if count:
        blocks = triton.next_power_of_2(q_width), triton.next_power_of_2(kv_width)
        per_program = _rows_per_program(count, sum(blocks))
        _qr_kv_norm_kernel[(triton.cdiv(count, per_program),)](
            qr_kv, q_weight, kv_weight, qr, scale, kv, qr_kv.stride(0), count, eps, Q_WIDTH=q_width, Q_BLOCK=blocks[0],
            KV_WIDTH=kv_width, KV_BLOCK=blocks[1], QUANT_MAX=int(fp8_format.quant_max) if fp8_format else 0,
            ROWS=per_program, num_warps=_warps(sum(blocks) * per_program), **early_launch(qr_kv.device),
        )  # fmt: skip
    return qr.view(fp8_format.torch_dtype) if fp8_format else qr, scale, kv


def _rows_per_program(num_rows: int, block: int) -> int:
    """Rows of one program: one where rows are few, else about 4096 elements of work."""
    return 1 if num_rows < 1024 else power_of_2_up_to(4096 // block)


def _warps(elements: int) -> int:
    return min(8, power_of_2_up_to(elements // 512))


def _check_weight(name: str, weight: torch.Tensor | None, width: int) -> None:
    if width == 0 or width > MAX_WIDTH:
        raise ShapeError("width of a norm", f"1 to {MAX_WIDTH}", width)
    if weight is not None:
        check_rows(name, weight, (width,))


def compile_specs() -> list[CompileSpec]:
    """The launches of Flash (q rank 1024, hidden 4096) and Pro (1536, 7168), for few rows and for many."""
    rows = {"num_rows": "i32", "eps": "fp32"}
    specs = []
    for width, count in ((4096, 1), (7168, 4096)):
        block = triton.next_power_of_2(width)
        per_program = _rows_per_program(count, block)
        pointers = {"x_ptr": "*bf16", "weight_ptr": "*fp32", "out_ptr": "*bf16"}
        signature = {**pointers, "stride_x": "i32", "stride_out": "i32", **rows}
        values = {"WIDTH": width, "BLOCK": block, "HAS_WEIGHT": True, "ROWS": per_program}
        name = f"rms_norm {width} x{per_program}"
        specs.append(spec(_rms_norm_kernel, name, signature, constexprs=values, num_warps=_warps(block * per_program)))
    kinds = ((1024, 1, None), (1024, 4096, None), (1536, 4096, None), *((1024, 4096, one) for one in Fp8Format))
    for q_width, count, encoding in kinds:
        limit = int(encoding.quant_max) if encoding else 0
        blocks = triton.next_power_of_2(q_width), 512
        per_program = _rows_per_program(count, sum(blocks))
        signature = {"qr_kv_ptr": "*bf16", "q_weight_ptr": "*fp32", "kv_weight_ptr": "*fp32",
                     "qr_ptr": "*u8" if limit else "*bf16", "scale_ptr": "*fp32", "kv_ptr": "*bf16",
                     "stride_x": "i32"}  # fmt: skip
        values = {"Q_WIDTH": q_width, "Q_BLOCK": blocks[0], "KV_WIDTH": 512, "KV_BLOCK": 512, "QUANT_MAX": limit,
                  "ROWS": per_program}  # fmt: skip
        name = f"qr_kv_norm {q_width} x{per_program}" + (f" fp8 {limit}" if limit else "")
        specs.append(spec(_qr_kv_norm_kernel, name, {**signature, **rows}, constexprs=values,
                          num_warps=_warps(sum(blocks) * per_program),
                          archs=archs_of(encoding) if encoding else ()))  # fmt: skip
    return specs
