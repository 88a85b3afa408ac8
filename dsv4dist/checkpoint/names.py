"""Which names a parameter may have in a checkpoint, and which release name a stored name means (checkpoint spec 4).

Three spellings are read, each with or without a leading `model.`: the releases', what transformers' save_pretrained
writes (a mixture), and the module names inside transformers. One table holds all of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

SCALE_SUFFIXES = ("scale", "weight_scale_inv", "weight_scale")
"""What may stand for `weight` in the name of a weight's scale tensor; each of them multiplies."""

# Release name -> other spellings. `*` stands for an expert number.
_TOP_LEVEL: dict[str, tuple[str, ...]] = {
    "embed.weight": ("embed_tokens.weight",),
    "norm.weight": (),
    "head.weight": ("lm_head.weight",),
    "hc_head_fn": ("hc_head.hc_fn",),
    "hc_head_base": ("hc_head.hc_base",),
    "hc_head_scale": ("hc_head.hc_scale",),
}

# The same below `layers.N.`.
_LAYER: dict[str, tuple[str, ...]] = {
    "attn_norm.weight": ("input_layernorm.weight",),
    "ffn_norm.weight": ("post_attention_layernorm.weight",),
    "hc_attn_fn": ("attn_hc.fn",),
    "hc_attn_base": ("attn_hc.base",),
    "hc_attn_scale": ("attn_hc.scale",),
    "hc_ffn_fn": ("ffn_hc.fn",),
    "hc_ffn_base": ("ffn_hc.base",),
    "hc_ffn_scale": ("ffn_hc.scale",),
    "attn.attn_sink": ("self_attn.sinks",),
    "attn.wq_a.weight": ("self_attn.q_a_proj.weight",),
    "attn.q_norm.weight": ("self_attn.q_a_norm.weight",),
    "attn.wq_b.weight": ("self_attn.q_b_proj.weight",),
    "attn.wkv.weight": ("self_attn.kv_proj.weight",),
    "attn.kv_norm.weight": ("attn.norm.weight", "self_attn.kv_norm.weight"),
    "attn.wo_a.weight": ("self_attn.o_a_proj.weight",),
    "attn.wo_b.weight": ("self_attn.o_b_proj.weight",),
    "attn.compressor.ape": ("self_attn.compressor.position_bias",),
    "attn.compressor.wkv.weight": ("self_attn.compressor.kv_proj.weight",),
    "attn.compressor.wgate.weight": ("self_attn.compressor.gate_proj.weight",),
    "attn.compressor.norm.weight": ("self_attn.compressor.kv_norm.weight",),
    "attn.indexer.wq_b.weight": ("self_attn.compressor.indexer.q_b_proj.weight",),
    "attn.indexer.weights_proj.weight": ("self_attn.compressor.indexer.scorer.weights_proj.weight",),
    "attn.indexer.compressor.ape": ("self_attn.compressor.indexer.position_bias",),
    "attn.indexer.compressor.wkv.weight": ("self_attn.compressor.indexer.kv_proj.weight",),
    "attn.indexer.compressor.wgate.weight": ("self_attn.compressor.indexer.gate_proj.weight",),
    "attn.indexer.compressor.norm.weight": ("self_attn.compressor.indexer.kv_norm.weight",),
    "ffn.gate.weight": ("mlp.gate.weight",),
    "ffn.gate.tid2eid": ("mlp.gate.tid2eid",),
    "ffn.gate.bias": ("mlp.gate.e_score_correction_bias",),
    "ffn.shared_experts.w1.weight": ("mlp.shared_experts.gate_proj.weight",),
    "ffn.shared_experts.w2.weight": ("mlp.shared_experts.down_proj.weight",),
    "ffn.shared_experts.w3.weight": ("mlp.shared_experts.up_proj.weight",),
    "ffn.experts.*.w1.weight": ("mlp.experts.*.gate_proj.weight",),
    "ffn.experts.*.w2.weight": ("mlp.experts.*.down_proj.weight",),
    "ffn.experts.*.w3.weight": ("mlp.experts.*.up_proj.weight",),
}

FUSED_GATE_UP = "ffn.experts.gate_up_proj"
FUSED_DOWN = "ffn.experts.down_proj"
"""All routed experts of a layer in one tensor: [E, 2I, D] (w1 rows, then w3 rows) and [E, D, I] (w2)."""

_FUSED: dict[str, tuple[str, ...]] = {
    FUSED_GATE_UP: ("mlp.experts.gate_up_proj",),
    FUSED_DOWN: ("mlp.experts.down_proj",),
}


_DRAFT: dict[str, tuple[str, ...]] = dict.fromkeys(
    (
        *("e_proj.weight", "h_proj.weight", "enorm.weight", "hnorm.weight", "norm.weight"),
        *("hc_head_fn", "hc_head_base", "hc_head_scale"),
    ),
    (),
)
"""What a draft layer has beside a layer's parameters."""


def _inverse(table: dict[str, tuple[str, ...]]) -> dict[str, str]:
    inverse = {name: name for name in table}
    inverse.update({other: name for name, others in table.items() for other in others})
    return inverse


_TOP_LEVEL_BY_SPELLING = _inverse(_TOP_LEVEL)
_LAYER_BY_SPELLING = _inverse(_LAYER | _FUSED | _DRAFT)
_LAYER_NAME = re.compile(r"(layers|mtp)\.(\d+)\.(.+)")
_EXPERT_NAME = re.compile(r"((?:ffn|mlp)\.experts\.)(\d+)(\..+)")
_RELEASE_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(w[123]\.weight)")


@dataclass(frozen=True)
class StackedName:
    """Where a routed expert's matrix lies in the stacked parameter of its layer."""

    key: str  # layers.N.ffn.experts.w1.weight
    expert: int


def is_draft_name(name: str) -> bool:
    """Whether a stored name belongs to a draft layer (`mtp.*`), which the main model does not use."""
    return name.removeprefix("model.").startswith("mtp.")


def release_name(name: str) -> str | None:
    """The release name that a stored name means, None if no spelling has it; fused experts give a FUSED_* name."""
    bare = name.removeprefix("model.")
    if bare in _TOP_LEVEL_BY_SPELLING:
        return _TOP_LEVEL_BY_SPELLING[bare]
    layer = _LAYER_NAME.fullmatch(bare)
    if layer is None:
        return None
    expert = _EXPERT_NAME.fullmatch(layer[3])
    spelling = f"{expert[1]}*{expert[3]}" if expert else layer[3]
    known = _LAYER_BY_SPELLING.get(spelling)
    if known is None:
        return None
    return f"{layer[1]}.{layer[2]}." + (known.replace("*", expert[2]) if expert else known)


def release_scale_name(name: str) -> str | None:
    """The release name of the weight that a stored scale tensor belongs to, None if `name` is not such a scale."""
    stem, _, suffix = name.rpartition(".")
    if suffix not in SCALE_SUFFIXES:
        return None
    return release_name(f"{stem}.weight")


def other_names(release: str) -> list[str]:
    """The other names under which the parameter with this release name is looked for (without fused experts)."""
    layer = _LAYER_NAME.fullmatch(release)
    if layer is None:
        others = [f"model.{other}" for other in _TOP_LEVEL.get(release, ())]
        return [f"model.{release}", *others]
    expert = _EXPERT_NAME.fullmatch(layer[3])
    known = f"{expert[1]}*{expert[3]}" if expert else layer[3]
    spellings = [other.replace("*", expert[2]) if expert else other for other in _LAYER.get(known, ())]
    return [f"model.{release}", *(f"model.{layer[1]}.{layer[2]}.{spelling}" for spelling in spellings)]


def save_pretrained_name(release: str) -> str:
    """The name that transformers' save_pretrained gives the parameter with this release name (checkpoint spec 4)."""
    if release == "head.weight":
        return release
    if release in _TOP_LEVEL:
        return f"model.{(_TOP_LEVEL[release] or (release,))[0]}"
    return "model." + re.sub(r"\.attn\.kv_norm\.weight$", ".attn.norm.weight", release)


def stacked_name(release: str) -> StackedName | None:
    """The stacked parameter that a routed expert's matrix goes into; None for every other parameter."""
    match = _RELEASE_EXPERT.fullmatch(release)
    return StackedName(f"{match[1]}.{match[3]}", int(match[2])) if match else None
