"""The whole model in float64 numpy, one request at positions 0..T-1, straight from the formulas.

Sources: attention spec 1.2 to 1.6 for `attention_layer`, checkpoint spec 6 for everything else. Parameters are a dict
under their release names. Only ModelConfig is shared with the package. Written to be read, not to be fast; equal
scores go to the lowest index.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from dsv4dist.config.model import LayerKind, ModelConfig, RotaryConfig

Array = np.ndarray
Params = dict[str, Array]


class Gaps:
    """How close each position came to another choice: the smallest score difference at a selection border.

    A run in lower precision may choose otherwise where the gap is tiny, and then differs from there on.
    """

    def __init__(self, num_tokens: int) -> None:
        self.smallest = np.full(num_tokens, np.inf)

    def note(self, pos: int, ordered_scores: Array, chosen: int) -> None:
        if 0 < chosen < len(ordered_scores):
            self.smallest[pos] = min(self.smallest[pos], ordered_scores[chosen - 1] - ordered_scores[chosen])


def read_parameters(directory: Path) -> Params:
    """All tensors of an unquantised release-format directory as float64 (int64 stays), under their own names."""
    import torch
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(Path(directory).glob("*.safetensors")):
        tensors.update(load_file(path))
    assert tensors, f"{directory} holds no safetensors"
    return {
        name: (tensor.double() if tensor.is_floating_point() else tensor).numpy() for name, tensor in tensors.items()
    }


def below(params: Params, prefix: str) -> Params:
    """The parameters under `prefix`, without it."""
    return {name.removeprefix(prefix): value for name, value in params.items() if name.startswith(prefix)}


# ---- Pieces ----------------------------------------------------------------------------------------------------------


def rms_norm(y: Array, eps: float, weight: Array | float = 1.0) -> Array:
    """y / sqrt(mean of squares + eps) * weight, over the last axis."""
    return y / np.sqrt(np.mean(y * y, axis=-1, keepdims=True) + eps) * weight


def sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-x))


def softmax(x: Array, axis: int) -> Array:
    shifted = np.exp(x - np.max(x, axis=axis, keepdims=True))
    return shifted / np.sum(shifted, axis=axis, keepdims=True)


def first_largest(scores: Array, count: int) -> Array:
    """Indices of the `count` largest scores, the larger first, of equal ones the lower index first."""
    return np.argsort(-scores, kind="stable")[:count]


def rotary_frequencies(rotary: RotaryConfig, dim: int) -> Array:
    """The dim/2 angles per position (attention spec 1.3): plain, or YaRN's blend of the plain and the stretched one."""
    freqs = []
    for i in range(dim // 2):
        extra = rotary.theta ** (-2.0 * i / dim)
        if rotary.factor is None:
            freqs.append(extra)
            continue

        def correction(rotations: float) -> float:
            turns = rotary.original_max_position / (2.0 * math.pi * rotations)
            return dim * math.log(turns) / (2.0 * math.log(rotary.theta))

        low = max(0.0, math.floor(correction(rotary.beta_fast)))
        high = min(dim - 1.0, math.ceil(correction(rotary.beta_slow)))
        ramp = min(1.0, max(0.0, (i - low) / (high - low if high != low else 0.001)))
        freqs.append(extra / rotary.factor * ramp + extra * (1.0 - ramp))
    return np.array(freqs)


def rotate(x: Array, pos: int, freqs: Array, inverse: bool = False) -> Array:
    """Turn the pairs (2i, 2i+1) of the last 2*len(freqs) channels of x [..., D] by pos * freqs[i]."""
    out = np.array(x, dtype=np.float64)
    first = x.shape[-1] - 2 * len(freqs)
    for i, freq in enumerate(freqs):
        cos, sin = math.cos(pos * freq), math.sin(pos * freq) * (-1.0 if inverse else 1.0)
        even, odd = x[..., first + 2 * i], x[..., first + 2 * i + 1]
        out[..., first + 2 * i] = even * cos - odd * sin
        out[..., first + 2 * i + 1] = odd * cos + even * sin
    return out


# ---- Attention -------------------------------------------------------------------------------------------------------


def attention_layer(x: Array, params: Params, config: ModelConfig, kind: LayerKind, gaps: Gaps | None = None) -> Array:
    """One attention layer: x [T, Hd] -> y [T, Hd]. `params` under release names after `layers.N.attn.`."""
    num_tokens = x.shape[0]
    heads, dim, eps = config.num_attention_heads, config.head_dim, config.rms_norm_eps
    freqs = rotary_frequencies(config.rope_of(kind), config.rope_head_dim)

    qr = rms_norm(x @ params["wq_a.weight"].T, eps, params["q_norm.weight"])
    kv = rms_norm(x @ params["wkv.weight"].T, eps, params["kv_norm.weight"])
    q = rms_norm((qr @ params["wq_b.weight"].T).reshape(num_tokens, heads, dim), eps)

    keys = np.stack([rotate(kv[pos], pos, freqs) for pos in range(num_tokens)])
    entries = np.zeros((0, dim))
    if kind is not LayerKind.SWA:
        entries = compress(x, below(params, "compressor."), config, kind, dim)
    chosen = visible_entries(x, qr, params, config, kind, gaps)

    y = np.zeros_like(x)
    for pos in range(num_tokens):
        window = keys[max(0, pos - config.sliding_window + 1) : pos + 1]
        attended = np.concatenate([window, entries[chosen[pos]]])
        out = attend(rotate(q[pos], pos, freqs), attended, params["attn_sink"], config.softmax_scale)
        y[pos] = project_output(rotate(out, pos, freqs, inverse=True), params, config)
    return y


def attend(q: Array, keys: Array, sink: Array, scale: float) -> Array:
    """q [H, D] over keys [N, D] that are also the values; exp(sink) joins the denominator only.  -> [H, D]"""
    out = np.zeros_like(q)
    for head in range(q.shape[0]):
        scores = scale * (keys @ q[head])
        top = max(np.max(scores), sink[head])
        weights = np.exp(scores - top)
        out[head] = weights @ keys / (np.sum(weights) + math.exp(sink[head] - top))
    return out


def project_output(out: Array, params: Params, config: ModelConfig) -> Array:
    """out [H, D] -> [Hd]: each group of heads through its own rows of wo_a, all groups through wo_b."""
    heads_per_group, rank = config.num_attention_heads // config.o_groups, config.o_lora_rank
    z = []
    for group in range(config.o_groups):
        joined = out[group * heads_per_group : (group + 1) * heads_per_group].reshape(-1)
        z.append(params["wo_a.weight"][group * rank : (group + 1) * rank] @ joined)
    return params["wo_b.weight"] @ np.concatenate(z)


def compress(x: Array, params: Params, config: ModelConfig, kind: LayerKind, dim: int) -> Array:
    """The completed entries of a compressor of output width `dim`: x [T, Hd] -> [T // ratio, dim]."""
    ratio = kind.compress_ratio
    num_entries = x.shape[0] // ratio
    freqs = rotary_frequencies(config.rope_of(kind), config.rope_head_dim)
    kv = x @ params["wkv.weight"].T
    score = x @ params["wgate.weight"].T
    for pos in range(x.shape[0]):
        score[pos] += params["ape"][pos % ratio]

    entries = np.zeros((num_entries, dim))
    for entry in range(num_entries):
        rows = []
        for pos in range((entry - kind.overlap + 1) * ratio, (entry + 1) * ratio):
            if pos < 0:
                continue  # weight 0: its score is -inf
            previous_window = pos < entry * ratio
            # CSA: the previous window contributes its first dim columns, the entry's own window its last dim.
            first = 0 if kind is LayerKind.HCA or previous_window else dim
            rows.append((kv[pos, first : first + dim], score[pos, first : first + dim]))
        row_kv, row_score = (np.stack(column) for column in zip(*rows, strict=True))
        pooled = np.sum(softmax(row_score, axis=0) * row_kv, axis=0)
        entries[entry] = rotate(rms_norm(pooled, config.rms_norm_eps, params["norm.weight"]), entry * ratio, freqs)
    return entries


def visible_entries(
    x: Array, qr: Array, params: Params, config: ModelConfig, kind: LayerKind, gaps: Gaps | None
) -> list[Array]:
    """For each position the compressed entries it attends to, ascending (attention spec 1.4 and 1.6)."""
    num_tokens = x.shape[0]
    complete = [(pos + 1) // kind.compress_ratio for pos in range(num_tokens)]
    if kind is LayerKind.SWA:
        return [np.arange(0) for _ in range(num_tokens)]
    if kind is LayerKind.HCA:
        return [np.arange(count) for count in complete]

    heads, dim = config.index_n_heads, config.index_head_dim
    freqs = rotary_frequencies(config.rope_of(kind), config.rope_head_dim)
    index_keys = compress(x, below(params, "indexer.compressor."), config, kind, dim)
    index_q = (qr @ params["indexer.wq_b.weight"].T).reshape(num_tokens, heads, dim)
    head_weights = x @ params["indexer.weights_proj.weight"].T * dim**-0.5 * heads**-0.5
    chosen = []
    for pos in range(num_tokens):
        dots = rotate(index_q[pos], pos, freqs) @ index_keys[: complete[pos]].T
        scores = head_weights[pos] @ np.maximum(dots, 0.0)
        order = first_largest(scores, len(scores))
        if gaps is not None:
            gaps.note(pos, scores[order], config.index_topk)
        chosen.append(np.sort(order[: config.index_topk]))
    return chosen


# ---- The rest of the model -------------------------------------------------------------------------------------------


def hyper_weights(streams: Array, fn: Array, base: Array, scale: Array, config: ModelConfig) -> tuple[Array, ...]:
    """One token's streams [hc, Hd] -> pre [hc], post [hc], comb [hc in, hc out] of a hyper-connection."""
    hc, eps = config.hc_mult, config.hc_eps
    m = fn @ rms_norm(streams.reshape(-1), config.rms_norm_eps)
    pre = sigmoid(m[:hc] * scale[0] + base[:hc]) + eps
    post = 2.0 * sigmoid(m[hc : 2 * hc] * scale[1] + base[hc : 2 * hc])
    comb = softmax((m[2 * hc :] * scale[2] + base[2 * hc :]).reshape(hc, hc), axis=1) + eps
    comb = comb / (np.sum(comb, axis=0, keepdims=True) + eps)
    for _ in range(config.hc_sinkhorn_iters - 1):
        comb = comb / (np.sum(comb, axis=1, keepdims=True) + eps)
        comb = comb / (np.sum(comb, axis=0, keepdims=True) + eps)
    return pre, post, comb


def feed_forward(x: Array, params: Params, limit: float) -> Array:
    """One token through one expert: w2(silu(min(w1 x, limit)) * clamp(w3 x))."""
    gate = np.minimum(params["w1.weight"] @ x, limit)
    up = np.clip(params["w3.weight"] @ x, -limit, limit)
    return params["w2.weight"] @ (gate * sigmoid(gate) * up)


def moe_layer(x: Array, token_ids: list[int], params: Params, config: ModelConfig, gaps: Gaps | None = None) -> Array:
    """Routed experts plus the shared one: x [T, Hd] -> [T, Hd]. `params` under names after `layers.N.ffn.`."""
    names = ["shared_experts", *(f"experts.{one}" for one in range(config.n_routed_experts))]
    experts = {name: below(params, f"{name}.") for name in names}
    out = np.zeros_like(x)
    for pos, token_id in enumerate(token_ids):
        scores = np.sqrt(np.logaddexp(0.0, params["gate.weight"] @ x[pos]))
        if "gate.tid2eid" in params:
            chosen = params["gate.tid2eid"][token_id]
        else:
            biased = scores + params["gate.bias"]
            order = first_largest(biased, len(biased))
            chosen = order[: config.num_experts_per_tok]
            if gaps is not None:
                gaps.note(pos, biased[order], config.num_experts_per_tok)
        weights = scores[chosen] / (np.sum(scores[chosen]) + 1e-20) * config.routed_scaling_factor
        out[pos] = feed_forward(x[pos], experts["shared_experts"], config.swiglu_limit)
        for one, weight in zip(chosen, weights, strict=True):
            out[pos] += weight * feed_forward(x[pos], experts[f"experts.{one}"], config.swiglu_limit)
    return out


def decoder_layer(
    streams: Array, token_ids: list[int], own: Params, kind: LayerKind, config: ModelConfig, gaps: Gaps | None = None
) -> Array:
    """streams [T, hc, Hd] -> [T, hc, Hd]: attention, then experts, each inside its own hyper-connection."""
    for block in ("attn", "ffn"):
        mixes = [
            hyper_weights(one, own[f"hc_{block}_fn"], own[f"hc_{block}_base"], own[f"hc_{block}_scale"], config)
            for one in streams
        ]
        x = np.stack([pre @ one for (pre, _, _), one in zip(mixes, streams, strict=True)])
        x = rms_norm(x, config.rms_norm_eps, own[f"{block}_norm.weight"])
        if block == "attn":
            y = attention_layer(x, below(own, "attn."), config, kind, gaps)
        else:
            y = moe_layer(x, token_ids, below(own, "ffn."), config, gaps)
        streams = np.stack(
            [np.outer(post, y[pos]) + comb.T @ streams[pos] for pos, (_, post, comb) in enumerate(mixes)]
        )
    return streams


def head(streams: Array, params: Params, config: ModelConfig) -> Array:
    """streams [T, hc, Hd] -> logits [T, vocab]."""
    logits = []
    for one in streams:
        m = params["hc_head_fn"] @ rms_norm(one.reshape(-1), config.rms_norm_eps)
        pre = sigmoid(m * params["hc_head_scale"] + params["hc_head_base"]) + config.hc_eps
        logits.append(params["head.weight"] @ rms_norm(pre @ one, config.rms_norm_eps, params["norm.weight"]))
    return np.stack(logits)


def model_logits(token_ids: list[int], params: Params, config: ModelConfig, gaps: Gaps | None = None) -> Array:
    """Logits [T, vocab] in float64 of one request. `gaps`, when given, is filled in."""
    return head(model_streams(token_ids, params, config, gaps), params, config)


def draft_logits(token_ids: list[int], next_token: int, params: Params, config: ModelConfig) -> Array:
    """Logits [vocab] of `mtp.0` for the token after `next_token`, which follows `token_ids`."""
    own, eps = below(params, "mtp.0."), config.rms_norm_eps
    following = [*token_ids[1:], next_token]
    streams = model_streams(token_ids, params, config)
    inputs = []
    for pos, token in enumerate(following):
        ahead = own["e_proj.weight"] @ rms_norm(params["embed.weight"][token], eps, own["enorm.weight"])
        inputs.append([ahead + own["h_proj.weight"] @ rms_norm(one, eps, own["hnorm.weight"]) for one in streams[pos]])
    drafted = decoder_layer(np.array(inputs), following, own, LayerKind.SWA, config)
    return head(drafted[-1:], own | {"head.weight": params["head.weight"]}, config)[0]


def model_streams(token_ids: list[int], params: Params, config: ModelConfig, gaps: Gaps | None = None) -> Array:
    """The streams [T, hc, Hd] behind the last layer."""
    rows = params["embed.weight"][np.asarray(token_ids)]
    streams = np.repeat(rows[:, None, :], config.hc_mult, axis=1)
    for layer in range(config.num_hidden_layers):
        own = below(params, f"layers.{layer}.")
        streams = decoder_layer(streams, token_ids, own, config.layer_kinds[layer], config, gaps)
    return streams
