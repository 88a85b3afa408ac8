"""Index scores straight from the paged keys, for decode rows and prompts alike (attention spec 1.6, 2.5 and 4.8)."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from dsv4dist.arch import ArchTraits, traits_by_name
from dsv4dist.errors import ShapeError, UnsupportedError
from dsv4dist.kernels._triton.block_matmul import FORMATS, arch_traits
from dsv4dist.kernels._triton.compile_spec import ARCHS, POINTER_OF, CompileSpec, spec
from dsv4dist.kernels._triton.early_launch import early_launch, wait_for_previous
from dsv4dist.kernels._triton.quantise import decode_e4m3
from dsv4dist.kernels._triton.topk import topk_slots
from dsv4dist.kernels.block_table import BlockTable
from dsv4dist.kernels.paged_cache import INDEX_DIM, INDEX_SCALE_BYTES, CacheFormat, Fp8Format, PagedCache

LOGITS_BYTES = 512 << 20
"""Bound on the logits that `select_key_list` holds at once; results do not depend on it."""
PITCH = 16  # rows of logits start at multiples of this many columns, so that they can be read in wide loads
PROGRAMS_PER_UNIT = 4
MANY_TOKENS = 512  # from here on a program scores several tokens against each tile of keys
_ROWS, _FNUZ = tl.constexpr(FORMATS[None]), tl.constexpr(FORMATS[Fp8Format.FNUZ])
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def load_query_tile(ptr, stride_head, num_heads, dim, CAST: tl.constexpr, DOT: tl.constexpr,
                    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """One token's index query, transposed: [BLOCK_D, BLOCK_H] in DOT. CAST: an encoding to decode from, or none."""
    head = tl.arange(0, BLOCK_H)[None, :]
    channel = tl.arange(0, BLOCK_D)[:, None]
    mask = (head < num_heads) & (channel < dim)
    q = tl.load(ptr + head * stride_head + channel, mask=mask, other=0.0)
    if CAST != _ROWS:
        return decode_e4m3(q, CAST == _FNUZ).to(DOT)
    else:
        return q.to(DOT)


@triton.jit
def load_key_tile(data_ptr, table_ptr, first, entry, first_block, length, num_blocks, table_width, stride_block, dim,
                  FORMAT: tl.constexpr, BLOCK_SIZE: tl.constexpr, NATIVE: tl.constexpr, DOT: tl.constexpr,
                  ONE_BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """The keys of `entry` [N], which begin at `first`: [N, BLOCK_D] in DOT and fp32 scales [N]; absent ones are 0.

    ONE_BLOCK: `first` is a multiple of N and N divides the block, so one look-up serves them all.
    """
    if ONE_BLOCK:
        column = first // BLOCK_SIZE - first_block
    else:
        column = entry // BLOCK_SIZE - first_block
    block = tl.load(table_ptr + column, mask=(column >= 0) & (column < table_width), other=-1)
    present = entry < tl.where((block >= 0) & (block < num_blocks), length, 0)
    page = block.to(tl.int64) * stride_block
    place = entry % BLOCK_SIZE
    channel = tl.arange(0, BLOCK_D)[None, :]
    if FORMAT == _ROWS:
        mask = present[:, None] & (channel < dim)
        keys = tl.load(data_ptr + (page + place * dim)[:, None] + channel, mask=mask, other=0.0).to(DOT)
        scale = tl.full(entry.shape, 1.0, tl.float32)
    else:
        key_ptr = data_ptr + (page + place * BLOCK_D)[:, None] + channel
        scale_ptr = (data_ptr + page + BLOCK_SIZE * BLOCK_D).to(tl.pointer_type(tl.float32)) + place
        scale = tl.load(scale_ptr, mask=present, other=0.0)
        if NATIVE:
            keys = tl.load(key_ptr.to(tl.pointer_type(DOT)), mask=present[:, None], other=0.0)
        else:
            byte = tl.load(key_ptr, mask=present[:, None], other=0)
            keys = decode_e4m3(byte, FORMAT == _FNUZ).to(DOT)
    return keys, scale


@triton.jit
def _indexer_logits_kernel(
    q_ptr,
    weights_ptr,
    data_ptr,
    blocks_ptr,
    first_block_ptr,
    token_to_req_ptr,
    lens_ptr,
    logits_ptr,
    num_tokens,
    num_heads,
    dim,
    max_entries,
    num_blocks,
    table_width,
    stride_q_token,
    stride_q_head,
    stride_weights,
    stride_block,
    stride_table,
    stride_logits,
    FORMAT: tl.constexpr,
    CAST_Q: tl.constexpr,
    NATIVE: tl.constexpr,
    DOT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Tokens [BLOCK_T * pid 0, ...) against every num_programs(1)-th tile of their requests' keys."""
    wait_for_previous()
    first_token = tl.program_id(0) * BLOCK_T
    head = tl.arange(0, BLOCK_H)
    lane = tl.arange(0, BLOCK_N)
    q = ()
    weight = ()
    req = ()
    length = ()
    first_req = tl.full((), 0x7FFFFFFF, tl.int32)
    last_req = tl.full((), -1, tl.int32)
    for t in tl.static_range(BLOCK_T):
        token = (first_token + t).to(tl.int64)
        present = token < num_tokens
        token_req = tl.load(token_to_req_ptr + token, mask=present, other=0).to(tl.int32)
        token_len = tl.minimum(tl.load(lens_ptr + token, mask=present, other=0).to(tl.int32), max_entries)
        first_req = tl.where(token_len > 0, tl.minimum(first_req, token_req), first_req)
        last_req = tl.where(token_len > 0, tl.maximum(last_req, token_req), last_req)
        token_heads = tl.where(present, num_heads, 0)  # nothing is read beyond the last token
        q_token = q_ptr + token * stride_q_token
        q = q + (load_query_tile(q_token, stride_q_head, token_heads, dim, CAST_Q, DOT, BLOCK_H, BLOCK_D),)
        weight_ptr = weights_ptr + token * stride_weights + head
        weight = weight + (tl.load(weight_ptr, mask=head < token_heads, other=0.0),)
        req = req + (token_req,)
        length = length + (token_len,)
    for r in range(first_req, last_req + 1):  # one request, unless the tokens lie on a border between requests
        longest = tl.full((), 0, tl.int32)
        for t in tl.static_range(BLOCK_T):
            longest = tl.where(req[t] == r, tl.maximum(longest, length[t]), longest)
        first_block = tl.load(first_block_ptr + r).to(tl.int32)
        table_ptr = blocks_ptr + tl.cast(r, tl.int64) * stride_table
        num_tiles = tl.cdiv(longest, BLOCK_N)
        for tile in tl.range(tl.program_id(1), num_tiles, tl.num_programs(1), num_stages=STAGES):
            entry = tile * BLOCK_N + lane
            keys, scale = load_key_tile(
                data_ptr, table_ptr, tile * BLOCK_N, entry, first_block, longest, num_blocks, table_width, stride_block, dim,
                FORMAT, BLOCK_SIZE, NATIVE, DOT, BLOCK_SIZE % BLOCK_N == 0, BLOCK_D,
            )  # fmt: skip
            for t in tl.static_range(BLOCK_T):
                score = tl.dot(keys, q[t], input_precision="ieee")
                score = tl.maximum(score, 0.0, propagate_nan=tl.PropagateNan.ALL)  # a NaN key must rank last
                logit = tl.sum(score * weight[t][None, :], 1) * scale
                row_ptr = logits_ptr + (first_token + t).to(tl.int64) * stride_logits
                tl.store(row_ptr + entry, logit, mask=entry < tl.where(req[t] == r, length[t], 0))


def indexer_logits(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: PagedCache,
    table: BlockTable,
    token_to_req: torch.Tensor,
    visible_lens: torch.Tensor,
    *,
    max_entries: int | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """Score every visible compressed entry for every token: sum over heads of relu(q . k) times the head's weight.

    T tokens, Hi index heads of Di channels (spec 1.6):
        q             [T, Hi, Di], float or the keys' fp8 dtype, unit stride in Di; weights [T, Hi] fp32
        cache, table  index keys (FP8_INDEX, block-flat, or ROWS) and where each request keeps them; a missing entry
                      scores 0
        token_to_req  [T] and visible_lens [T], int32 or int64; rows of length 0 are not touched
        max_entries   width of the result, an upper bound of visible_lens; None reads the bound from the device
        num_splits    programs that share one token's keys; planned from sizes if None
    Returns fp32 [T, max_entries]; columns at or beyond a row's visible_lens are undefined. fp8 queries meet fp8 keys in
    the device's fp8 matrix unit, or in fp16 where it has none for the encoding.
    Capture: with max_entries the launch depends on sizes only.  Raises: ShapeError, UnsupportedError.
    """
    _check(q, weights, cache, table, token_to_req, visible_lens)
    tokens, heads, dim = q.shape
    if max_entries is None:
        max_entries = max(0, int(visible_lens.max())) if tokens else 0
    pitch = -(-max_entries // PITCH) * PITCH
    logits = torch.empty((tokens, pitch), dtype=torch.float32, device=q.device)[:, :max_entries]
    if tokens == 0 or max_entries == 0 or cache.num_slots == 0 or table.blocks.shape[1] == 0:
        return logits.zero_()  # no key is stored anywhere, so every entry is a missing one
    arch = arch_traits(q.device)
    constants = _constants(q, cache, arch)
    tiles, groups = -(-max_entries // constants["BLOCK_N"]), -(-tokens // constants["BLOCK_T"])
    if num_splits is None:
        num_splits = max(1, min(tiles, PROGRAMS_PER_UNIT * arch.compute_units // groups))
    data = cache.data
    _indexer_logits_kernel[(groups, num_splits)](
        q.view(torch.uint8) if constants["CAST_Q"] else q,
        weights,
        data,
        table.blocks,
        table.first_block,
        token_to_req.contiguous(),
        visible_lens.contiguous(),
        logits,
        tokens,
        heads,
        dim,
        max_entries,
        data.shape[0],
        table.blocks.shape[1],
        q.stride(0),
        q.stride(1),
        weights.stride(0),
        data.stride(0),
        table.blocks.stride(0),
        logits.stride(0),
        num_warps=4,
        **early_launch(q.device),
        **constants,
    )
    return logits


def select_key_list(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: PagedCache,
    table: BlockTable,
    token_to_req: torch.Tensor,
    visible_lens: torch.Tensor,
    k: int,
    max_entries: int | None = None,
    *,
    logits_bytes: int = LOGITS_BYTES,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The slots of each token's `k` best entries: `indexer_logits` and `topk_slots`, in slices of `logits_bytes`.

    Arguments as there. Returns indices int32 [T * k], of which the first indptr[T] are defined, and indptr int32 [T + 1].
    Keys are read where they are stored, so a slice shares nothing with the one before it.
    Capture: with max_entries launches depend on sizes only.
    """
    tokens = q.shape[0]
    if max_entries is None:
        max_entries = max(0, int(visible_lens.max())) if tokens else 0
    indices = torch.empty(tokens * k, dtype=torch.int32, device=q.device)
    indptr = (torch.empty if tokens else torch.zeros)(tokens + 1, dtype=torch.int32, device=q.device)
    rows = max(1, logits_bytes // max(1, -(-max_entries // PITCH) * PITCH * 4))
    for first in range(0, tokens, rows):
        part = slice(first, first + rows)
        reqs, lens = token_to_req[part], visible_lens[part]
        logits = indexer_logits(q[part], weights[part], cache, table, reqs, lens, max_entries=max_entries)
        topk_slots(logits, visible_lens, k, table, token_to_req, indices, indptr, first)
    return indices, indptr


def _constants(q: torch.Tensor, cache: PagedCache, arch: ArchTraits) -> dict[str, Any]:
    """The kernel's compile-time arguments; only types and sizes of the tensors count."""
    tokens, heads, dim = q.shape
    dot, cast_q, native = _dot_type(q, cache, arch)
    block_t = 4 if tokens >= MANY_TOKENS and dot != tl.float32 else 1
    block_n = 32 if dot == tl.float32 else 128 if block_t > 1 and native else 64  # wider keys spill in larger tiles
    return {
        "FORMAT": FORMATS[cache.fp8_format],
        "CAST_Q": cast_q,
        "NATIVE": native,
        "DOT": dot,
        "BLOCK_SIZE": cache.block_size,
        "BLOCK_T": block_t,
        "BLOCK_N": block_n,
        "BLOCK_H": max(16, triton.next_power_of_2(heads)),
        "BLOCK_D": INDEX_DIM if cache.format is CacheFormat.FP8_INDEX else max(32, triton.next_power_of_2(dim)),
        "STAGES": 3,
    }


def _dot_type(q: torch.Tensor, cache: PagedCache, arch: ArchTraits) -> tuple[tl.dtype, int, bool]:
    """(type that q and keys are multiplied in, encoding that q must be decoded from, keys need no decoding)."""
    in_torch = arch.name == "cpu"  # the interpreter: its bf16 product is wrong, its fp8 one slow
    if q.dtype.itemsize == 1:
        assert cache.fp8_format is not None, "an fp8 query belongs to an fp8 cache"
        if cache.fp8_format is arch.fp8_format and not in_torch:
            return (tl.float8e4nv if cache.fp8_format is Fp8Format.OCP else tl.float8e4b8), FORMATS[None], True
        return tl.float16, FORMATS[cache.fp8_format], False
    types = {q.dtype} if cache.format is CacheFormat.FP8_INDEX else {q.dtype, cache.data.dtype}
    if len(types) > 1 or torch.float32 in types or in_torch:
        return tl.float32, FORMATS[None], False
    return (tl.bfloat16 if q.dtype == torch.bfloat16 else tl.float16), FORMATS[None], False


def _check(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: PagedCache,
    table: BlockTable,
    token_to_req: torch.Tensor,
    visible_lens: torch.Tensor,
) -> None:
    data = cache.data
    tokens, heads, dim = q.shape
    if q.dtype not in _FLOATS and (cache.fp8_format is None or q.dtype != cache.fp8_format.torch_dtype):
        raise ShapeError("index query", "a float dtype or the encoding of the keys", q.dtype)
    if q.stride(2) != 1:
        raise ShapeError("index query", "unit stride in the last dimension", q.stride())
    if weights.shape != (tokens, heads) or weights.dtype != torch.float32 or weights.stride(1) != 1:
        raise ShapeError("head weights", f"fp32 {[tokens, heads]}", f"{weights.dtype} {list(weights.shape)}")
    for name, rows in (("token_to_req", token_to_req), ("visible_lens", visible_lens)):
        if rows.shape != (tokens,) or rows.dtype not in (torch.int32, torch.int64):
            raise ShapeError(name, f"int32 or int64 {[tokens]}", f"{rows.dtype} {list(rows.shape)}")
    if table.block_size != cache.block_size or table.blocks.stride(1) != 1:
        raise ShapeError("block table", f"blocks of {cache.block_size} entries, unit stride", table.block_size)
    if cache.format is CacheFormat.FP8_INDEX:
        page = cache.block_size * (INDEX_DIM + INDEX_SCALE_BYTES)
        if dim != INDEX_DIM or data.dtype != torch.uint8 or data.shape[1] < page:
            raise ShapeError("index cache", f"uint8 pages of {page} bytes for {dim} channels", list(data.shape))
        if data.stride(0) % INDEX_SCALE_BYTES or data.stride(1) != 1 or data.data_ptr() % INDEX_SCALE_BYTES:
            raise ShapeError("index cache", "pages at multiples of 4 bytes, unit stride", data.stride())
    elif cache.format is not CacheFormat.ROWS:
        raise UnsupportedError(f"index keys cannot be stored as {cache.format.value}; use fp8_index or rows")
    elif data.shape[1:] != (cache.block_size, dim) or data.stride()[1:] != (dim, 1) or data.dtype not in _FLOATS:
        raise ShapeError(
            "index cache", f"float [blocks, {cache.block_size}, {dim}]", f"{data.dtype} {list(data.shape)}"
        )


def compile_specs() -> list[CompileSpec]:
    """64 index heads of 128 channels over blocks of 64 keys, fp8 and bf16, one token a program and several."""
    specs = []
    for arch in map(traits_by_name, ARCHS):
        for kind in ("fp8", "bf16"):
            fp8_format = arch.fp8_format if kind == "fp8" else None
            dtype = fp8_format.torch_dtype if fp8_format else torch.bfloat16
            for tokens in (1, MANY_TOKENS):
                q = torch.empty((tokens, 64, INDEX_DIM), dtype=dtype, device="meta")
                if fp8_format:
                    data = torch.empty((1, 64 * (INDEX_DIM + INDEX_SCALE_BYTES)), dtype=torch.uint8, device="meta")
                    cache = PagedCache(data, 64, CacheFormat.FP8_INDEX, fp8_format)
                else:
                    cache = PagedCache(torch.empty((1, 64, INDEX_DIM), dtype=dtype, device="meta"), 64)
                values = _constants(q, cache, arch)
                specs.append(_spec(f"{kind} x{values['BLOCK_T']}", q, cache, values, arch.name))
    return specs


def _spec(name: str, q: torch.Tensor, cache: PagedCache, values: dict[str, Any], arch: str) -> CompileSpec:
    q_type, data_type = (POINTER_OF[str(one.dtype).removeprefix("torch.")] for one in (q, cache.data))
    counts = ("num_tokens", "num_heads", "dim", "max_entries", "num_blocks", "table_width")
    strides = ("q_token", "q_head", "weights", "block", "table", "logits")
    signature = {
        "q_ptr": "*u8" if values["CAST_Q"] else q_type, "weights_ptr": "*fp32", "data_ptr": data_type,
        "blocks_ptr": "*i32", "first_block_ptr": "*i32", "token_to_req_ptr": "*i64", "lens_ptr": "*i64",
        "logits_ptr": "*fp32", **dict.fromkeys(counts, "i32"), **{f"stride_{one}": "i32" for one in strides},
    }  # fmt: skip
    return spec(
        _indexer_logits_kernel, f"indexer_logits {name}", signature, constexprs=values, unaligned=("stride_table",),
        aligned=("num_heads", "dim"), large=("data_ptr",), archs=(arch,), has_dot=True,
    )  # fmt: skip
