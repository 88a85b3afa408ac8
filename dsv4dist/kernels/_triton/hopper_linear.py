"""Few rows times fp8 weights on Hopper, in Gluon: 16-bit activations meet exactly the stored weights (spec 6.2).

What takes the time is reading the weight. Its bytes are copied asynchronously, several tiles ahead and also ahead of the
kernel before this one; each lane takes four adjacent ones at a time, converts them in registers, and they are the left
operand of a warpgroup instruction as they lie. The channels of x are put in the order that results from that.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dsv4dist.kernels._triton.arrivals import arrival_counters
from dsv4dist.kernels._triton.compile_spec import CompileSpec, spec
from dsv4dist.kernels._triton.early_launch import early_launch, wait_for_previous_gluon
from dsv4dist.kernels._triton.hopper_decode import PANEL32, barrier, load_to_shared, view

BLOCK = gl.constexpr(128)  # channels that share a scale, and that one step takes
BYTES = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
# Four e4m3 bytes -> two pairs of bf16 (through fp16, exact).
_TO_BF16 = gl.constexpr("""{ .reg .b16 a, b, h<4>; .reg .b32 x, y; .reg .f32 f<4>;
    mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 x, a; cvt.rn.f16x2.e4m3x2 y, b;
    mov.b32 {h0, h1}, x; mov.b32 {h2, h3}, y;
    cvt.f32.f16 f0, h0; cvt.f32.f16 f1, h1; cvt.f32.f16 f2, h2; cvt.f32.f16 f3, h3;
    cvt.rn.bf16x2.f32 $0, f1, f0; cvt.rn.bf16x2.f32 $1, f3, f2; }""")
_TO_FP16 = gl.constexpr("""{ .reg .b16 a, b; mov.b32 {a, b}, $2;
    cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }""")
_HALVES = gl.constexpr("mov.b32 {$0, $1}, $2;")


@gluon.jit
def operand_order(pairs, ROWS: gl.constexpr):
    """Reorder channels from how they lie in memory to how a product meets them: pairs [ROWS, 64].

    Of each 16 channels a product wants the pairs 0 and 4 of lane 0, 1 and 5 of lane 1, and so on; a lane has four
    adjacent ones, so that memory's pairs 0 and 1 become the product's 0 and 4.
    """
    parts = gl.permute(gl.reshape(pairs, (ROWS, 8, 4, 2)), (0, 1, 3, 2))
    return gl.reshape(parts, (ROWS, 64))


@gluon.jit
def weight_operand(raw, DTYPE: gl.constexpr, COLUMNS: gl.constexpr, PRODUCT: gl.constexpr):
    """Four bytes in each of [COLUMNS, 32] as a left operand [COLUMNS, 128] in DTYPE; nothing moves for it."""
    convert: gl.constexpr = _TO_FP16 if gl.float16 == DTYPE else _TO_BF16
    first, second = gl.inline_asm_elementwise(
        convert, "=r,=r,r", [raw], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    pairs = operand_order(gl.join(first, second), COLUMNS)
    low, high = gl.inline_asm_elementwise(_HALVES, "=h,=h,r", [pairs], dtype=(gl.int16, gl.int16), is_pure=True, pack=1)
    weight = gl.reshape(gl.join(low, high), (COLUMNS, BLOCK)).to(DTYPE, bitcast=True)
    return gl.convert_layout(weight, gl.DotOperandLayout(0, PRODUCT, 2))


@gluon.jit
def copy_weight(bytes_smem, from_ptr, column, step, count, STAGES: gl.constexpr):
    """Start copying the two blocks of a step; what lies behind the last block becomes 0."""
    for half in gl.static_range(2):
        block = step * 2 + half
        wanted = (column >= 0) & (block < count)
        load_to_shared(bytes_smem.index(step % STAGES * 2 + half), from_ptr + block * 32, mask=wanted[:, None])
    async_copy.commit_group()


@gluon.jit
def load_x(x_row_ptr, scales, step, row_ok, count, LOAD: gl.constexpr):
    """Start loading both blocks of a step: pairs of x [ROWS, 64] and scales of the weight; 0 where there is nothing."""
    pair = gl.arange(0, 64, gl.SliceLayout(0, LOAD))
    x = ()
    scale = ()
    for half in gl.static_range(2):
        block = step * 2 + half
        wanted = row_ok & (block < count)
        x = x + (gl.load(x_row_ptr + (block * 64 + pair)[None, :], mask=wanted[:, None], other=0),)
        scale = scale + (gl.load(scales + block, mask=block < count, other=0.0),)
    return x, scale


@gluon.jit
def hopper_linear_kernel(
    x_ptr, weight_ptr, scale_ptr, out_ptr, part_ptr, counter_ptr, num_rows, num_columns, blocks, blocks_per_split,
    stride_x_group, stride_x_row, stride_group, stride_row, stride_scale_group, stride_scale_row, stride_out_group,
    stride_out_row, SPLIT: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One tile [16 * WARPS columns, ROWS] of (x . w^T)^T over a share of the channels; strides of x and weight count 4 bytes.

    SPLIT: shares are summed, first to last, by whoever comes last to a tile; `counter_ptr` has `arrival_counters`.
    """
    COLUMNS: gl.constexpr = 16 * WARPS
    BOTH: gl.constexpr = ROWS <= 16  # products under way at once; more rows lack the registers
    TWO_AHEAD: gl.constexpr = ROWS > 16 and WARPS == 4  # x; with 8 warps two programs would not share a unit any more
    AHEAD: gl.constexpr = 8 if BOTH else 4  # parts that the last program asks for at once
    DTYPE: gl.constexpr = x_ptr.dtype.element_ty
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 16])
    COPY: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [WARPS, 1], [1, 0])
    OF_WARPS: gl.constexpr = [[16, 0], [32, 0]] if WARPS == 4 else [[16, 0], [32, 0], [64, 0]]
    # Four lanes have 16 adjacent bytes of a row; a warp has the 16 rows that are its rows of a product.
    TAKE: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0], [0, 4], [0, 8], [0, 16]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], OF_WARPS, [], [COLUMNS, 32]
    )
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])  # 16 channels a thread: it can order them

    tile = gl.program_id(0)
    split = gl.program_id(1)
    group = gl.program_id(2).to(gl.int64)
    begin = split * blocks_per_split
    count = gl.minimum(blocks_per_split, blocks - begin)

    column = gl.minimum(tile * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(1, COPY)), num_columns - 1)
    dword = gl.arange(0, 32, gl.SliceLayout(0, COPY))
    dwords_ptr = weight_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + group * stride_group + begin * 32
    from_ptr = dwords_ptr + column.to(gl.int64)[:, None] * stride_row + dword[None, :]
    steps = gl.cdiv(count, 2)
    bytes_smem = gl.allocate_shared_memory(gl.int32, [2 * STAGES, COLUMNS, 32], BYTES)
    x_smem = gl.allocate_shared_memory(gl.int32, [4, ROWS, 64], PANEL32)
    for ahead in gl.static_range(STAGES - 1):
        copy_weight(bytes_smem, from_ptr, column, ahead, count, STAGES)
    wait_for_previous_gluon()  # the weight may be read before: nothing writes it
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LOAD))
    row_ok = row < num_rows
    x_row_ptr = x_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + group * stride_x_group + begin * 64
    x_row_ptr = x_row_ptr + row.to(gl.int64)[:, None] * stride_x_row
    scales = scale_ptr + group * stride_scale_group + (tile * COLUMNS // BLOCK).to(gl.int64) * stride_scale_row + begin
    x, scale = load_x(x_row_ptr, scales, 0, row_ok, count, LOAD)
    if TWO_AHEAD:
        next_x, next_scale = load_x(x_row_ptr, scales, 1, row_ok, count, LOAD)
    total = gl.zeros((COLUMNS, ROWS), gl.float32, PRODUCT)
    nothing = gl.zeros((COLUMNS, ROWS), gl.float32, PRODUCT)
    for i in range(0, steps):
        for half in gl.static_range(2):
            x_smem.index(i % 2 * 2 + half).store(operand_order(x[half], ROWS))
        async_copy.wait_group(STAGES - 2)
        fence_async_shared()
        barrier()
        copy_weight(bytes_smem, from_ptr, column, i + STAGES - 1, count, STAGES)
        before = scale
        if TWO_AHEAD:
            x, scale = next_x, next_scale
            next_x, next_scale = load_x(x_row_ptr, scales, i + 2, row_ok, count, LOAD)
        else:
            x, scale = load_x(x_row_ptr, scales, i + 1, row_ok, count, LOAD)
        products = ()
        for half in gl.static_range(2):
            raw = bytes_smem.index(i % STAGES * 2 + half).load(TAKE)
            weight = weight_operand(raw, DTYPE, COLUMNS, PRODUCT)
            x_right = view(x_smem.index(i % 2 * 2 + half), DTYPE, ROWS, BLOCK).permute((1, 0))
            product = warpgroup_mma(weight, x_right, nothing, use_acc=False, is_async=True)
            if BOTH:
                products = products + (product,)
            else:
                total += warpgroup_mma_wait(0, deps=[product]) * before[half]
        if BOTH:
            first, second = warpgroup_mma_wait(0, deps=products)
            total += first * before[0]
            total += second * before[1]
    async_copy.wait_group(0)

    OUT: gl.constexpr = gl.BlockedLayout([4, 1], [COLUMNS // 4, 128 // COLUMNS], [1, WARPS], [0, 1])
    out_column = tile * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(1, OUT))
    out_row = gl.arange(0, ROWS, gl.SliceLayout(0, OUT))
    at = out_ptr + group * stride_out_group + out_row.to(gl.int64)[None, :] * stride_out_row + out_column[:, None]
    wanted = (out_column < num_columns)[:, None] & (out_row < num_rows)[None, :]
    if SPLIT:
        splits = gl.num_programs(1)
        place = (group * gl.num_programs(0) + tile) * splits
        # A part lies in memory in the order of registers: what the last one reads is what it would have had.
        part_column = gl.arange(0, COLUMNS, gl.SliceLayout(1, PRODUCT))
        part_row = gl.arange(0, ROWS, gl.SliceLayout(0, PRODUCT))
        within = part_ptr + part_column[:, None] * ROWS + part_row[None, :]
        gl.store(within + (place + split) * (COLUMNS * ROWS), total)
        barrier()
        counter = counter_ptr + group * gl.num_programs(0) + tile
        came_before = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        if came_before == splits - 1:
            total = gl.zeros((COLUMNS, ROWS), gl.float32, PRODUCT)
            for first in range(0, splits, AHEAD):
                parts = ()
                for ahead in gl.static_range(AHEAD):
                    one = first + ahead
                    there = (part_row < gl.where(one < splits, ROWS, 0))[None, :]
                    part = within + (place + one) * (COLUMNS * ROWS)
                    parts = parts + (gl.load(part, mask=there, other=0.0, cache_modifier=".cg"),)
                for ahead in gl.static_range(AHEAD):
                    total += parts[ahead]
            gl.store(at, gl.convert_layout(total, OUT).to(out_ptr.dtype.element_ty), mask=wanted)
            gl.store(counter, 0)
    else:
        gl.store(at, gl.convert_layout(total, OUT).to(out_ptr.dtype.element_ty), mask=wanted)


MAX_ROWS = 32
"""For more rows than this the portable product is as fast, and a library's that quantises them is faster."""
MAX_SPLITS, STAGES = 16, 2
FEW_ROWS, MANY_WEIGHTS = 16, 1 << 24
"""More rows than the first take weights of at least the second in wider tiles, which read x less often."""


def takes(x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor) -> bool:
    """Whether `hopper_linear` knows these types and sizes; the device is the caller's business."""
    whole = weight.shape[2] % BLOCK.value == 0 and weight.stride(1) % 16 == 0 and weight.stride(0) % 16 == 0
    aligned = x.data_ptr() % 16 == 0 and x.stride(0) % 8 == 0 and x.stride(1) % 8 == 0
    scaled = weight_scale.dtype == torch.float32 and weight_scale.stride(2) == 1
    return whole and aligned and scaled and x.dtype in (torch.bfloat16, torch.float16) and 0 < len(x) <= MAX_ROWS


def hopper_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    out: torch.Tensor,
    compute_units: int,
    num_splits: int | None = None,
) -> None:
    """out[t, group] = weight[group] . x[t, group], accumulated in fp32, with one scale per 128 x 128 weights.

        x       [T, g, K] as `takes` has it, T at most MAX_ROWS
        weight  [g, N, K] e4m3 in OCP encoding; weight_scale [g, ceil(N / 128), K / 128] fp32
        out     [T, g, N] of x's dtype, unit stride in N, written
    The result does not depend on the order in which programs run.  Capture: the launch depends on sizes only.
    """
    rows, groups, channels = x.shape
    columns, blocks = weight.shape[1], channels // BLOCK.value
    padded = max(8, triton.next_power_of_2(rows))
    warps = _warps(padded, weight.numel())
    tiles = triton.cdiv(columns, 16 * warps)
    splits = num_splits or plan_splits(tiles * groups, blocks, padded, warps, compute_units)
    per_split = triton.cdiv(blocks, splits)
    splits = triton.cdiv(blocks, per_split)
    parts = counters = None
    if splits > 1:
        counters = arrival_counters(tiles * groups, x.device)
        parts = torch.empty(groups * tiles * splits * 16 * warps * padded, dtype=torch.float32, device=x.device)
    data = weight.view(torch.uint8)
    hopper_linear_kernel[(tiles, splits, groups)](
        x, data, weight_scale, out, parts, counters, rows, columns, blocks, per_split, x.stride(1) // 2, x.stride(0) // 2,
        data.stride(0) // 4, data.stride(1) // 4, weight_scale.stride(0), weight_scale.stride(1), out.stride(1),
        out.stride(0), SPLIT=splits > 1, ROWS=padded, WARPS=warps, STAGES=STAGES, num_warps=warps, **early_launch(x.device),
    )  # fmt: skip


def _warps(padded: int, num_weights: int) -> int:
    """Warps of a program, each of which has 16 columns."""
    return 8 if padded > FEW_ROWS and num_weights >= MANY_WEIGHTS else 4


def plan_splits(tiles: int, blocks: int, padded: int, warps: int, compute_units: int) -> int:
    """Shares of the channels: so many that programs fill the device, of two blocks each, or of four where there are more
    than four shares, whose sum takes longer than what further ones save.

    Four programs of few rows share a multiprocessor, or two wide ones. Narrow ones of more rows get one each, and counts
    that divide the channels: a share more costs what it saves, since its sums are larger.
    """
    programs = compute_units * (4 if padded <= FEW_ROWS else warps // 4)
    most = max(min(4, blocks // 2), blocks // 4)
    splits = max(1, min(MAX_SPLITS, most, programs // tiles))
    return splits if padded <= FEW_ROWS or warps == 8 else 1 << (splits.bit_length() - 1)


def compile_specs() -> list[CompileSpec]:
    """Flash's wo_b, in shares and whole, at every number of rows that has a program of its own."""
    signature = {
        **dict.fromkeys(("x_ptr", "out_ptr"), "*bf16"), "weight_ptr": "*u8",
        **dict.fromkeys(("scale_ptr", "part_ptr"), "*fp32"), "counter_ptr": "*i32",
        **dict.fromkeys(("num_rows", "num_columns", "blocks", "blocks_per_split"), "i32"),
        **{f"stride_{one}": "i32" for one in (
            "x_group", "x_row", "group", "row", "scale_group", "scale_row", "out_group", "out_row")},
    }  # fmt: skip
    specs = []
    for rows, weights in ((8, 0), (16, 0), (32, 0), (32, MANY_WEIGHTS)):
        warps = _warps(rows, weights)
        for split in (False, True):
            absent = {} if split else dict.fromkeys(("part_ptr", "counter_ptr"))
            values = {"SPLIT": split, "ROWS": rows, "WARPS": warps, "STAGES": STAGES, **absent}
            present = {name: kind for name, kind in signature.items() if name not in absent}
            name = f"hopper_linear {16 * warps}x{rows}" + (" split" if split else "")
            specs.append(spec(
                hopper_linear_kernel, name, present, constexprs=values, num_warps=warps,
                unaligned=("stride_scale_group", "stride_scale_row"), aligned=("num_columns",), archs=("sm90",), has_dot=True,
            ))  # fmt: skip
    return specs
