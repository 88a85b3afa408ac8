"""DeepSeek-V4 as transformers runs it: fp32, eager attention, equal scores to the lowest index.

Its own top-k picks among equal scores in an order that depends on the row length, which the definition leaves open;
here a stable sort stands in for it (checkpoint spec 5).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

SLIDING, CSA, HCA = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"

TINY: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "partial_rotary_factor": 0.5,
    "q_lora_rank": 24,
    "o_groups": 2,
    "o_lora_rank": 16,
    "index_n_heads": 16,
    "index_head_dim": 24,
    "index_topk": 8,
    "moe_intermediate_size": 32,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.5,
    "hc_mult": 4,
    "max_position_embeddings": 4096,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 256,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "bos_token_id": 0,
    "eos_token_id": 1,
}


class _TopK(NamedTuple):
    values: torch.Tensor
    indices: torch.Tensor


@contextmanager
def stable_topk() -> Iterator[list[torch.Tensor]]:
    """Inside, top-k of torch prefers the lower index among equal scores.

    Yields a list that receives, per call, how far the last chosen score lies above the best one left out [...].
    """
    gaps: list[torch.Tensor] = []

    def topk(scores: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> _TopK:
        assert dim == -1
        assert largest
        values, indices = torch.sort(scores, dim=-1, descending=True, stable=True)
        if 0 < k < values.shape[-1]:
            gap = values[..., k - 1] - values[..., k]
            gaps.append(torch.where(values[..., k].isfinite(), gap, torch.inf))
        return _TopK(values[..., :k], indices[..., :k])

    with mock.patch.object(torch, "topk", topk), mock.patch.object(torch.Tensor, "topk", topk):
        yield gaps


def random_model(
    layer_types: list[str], seed: int = 0, num_hash_layers: int = 0, **overrides: Any
) -> DeepseekV4ForCausalLM:
    """A tiny fp32 model whose every parameter and buffer is random, none at its initial constant.

    Matrices are scaled by their input width, so that logits have a standard deviation near 1 to 3.
    """
    layers = len(layer_types)
    config = DeepseekV4Config(
        **{**TINY, **overrides},
        num_hidden_layers=layers,
        layer_types=list(layer_types),
        mlp_layer_types=["hash_moe"] * num_hash_layers + ["moe"] * (layers - num_hash_layers),
    )
    config._attn_implementation = "eager"
    model = DeepseekV4ForCausalLM(config).float().eval()
    generator = torch.Generator().manual_seed(seed)

    def normal(shape: torch.Size, std: float, mean: float = 0.0) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * std + mean

    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("inv_freq"):
                continue
            if name.endswith("tid2eid"):
                experts = config.n_routed_experts
                rows = [torch.randperm(experts, generator=generator)[: tensor.shape[1]] for _ in range(tensor.shape[0])]
                tensor.copy_(torch.stack(rows))
            elif "norm" in name:
                tensor.copy_(normal(tensor.shape, 0.15, 1.0))
            elif name.endswith("scale"):
                tensor.copy_(normal(tensor.shape, 0.1, 0.7))
            elif name.endswith("e_score_correction_bias"):
                tensor.copy_(normal(tensor.shape, 0.2))
            elif name.endswith(("sinks", "base", "position_bias")):
                tensor.copy_(normal(tensor.shape, 0.5))
            elif "embed_tokens" in name:
                tensor.copy_(normal(tensor.shape, 1.0))
            else:
                tensor.copy_(normal(tensor.shape, 1.2 * tensor.shape[-1] ** -0.5))
    return model


def load_model(directory: Path) -> DeepseekV4ForCausalLM:
    """Load any directory transformers can read, in fp32.  A missing or unexpected key is an assertion."""
    model, info = DeepseekV4ForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True, local_files_only=True
    )
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info.get(problem), f"{directory}: {problem} {sorted(map(str, info[problem]))[:10]}"
    return model.float().eval()


class Scored(NamedTuple):
    """One forward: logits float32 [T, vocab], and per position the smallest gap at a selection border [T]."""

    logits: np.ndarray
    gaps: np.ndarray


def score(model: DeepseekV4ForCausalLM, token_ids: list[int]) -> Scored:
    """One whole forward of one request, without a cache."""
    with torch.no_grad(), stable_topk() as gaps:
        out = model(torch.tensor([token_ids]), use_cache=False)
    smallest = np.full(len(token_ids), np.inf, dtype=np.float32)
    for gap in gaps:
        smallest = np.minimum(smallest, gap.reshape(-1).float().numpy())
    return Scored(out.logits[0].float().numpy(), smallest)


def logits(model: DeepseekV4ForCausalLM, token_ids: list[int]) -> np.ndarray:
    """Logits of every position of one request: float32 [T, vocab]."""
    return score(model, token_ids).logits


def greedy(model: DeepseekV4ForCausalLM, token_ids: list[int], count: int) -> list[int]:
    """`count` greedy tokens after `token_ids`, each from a whole forward, so that no cache is trusted."""
    ids = list(token_ids)
    for _ in range(count):
        ids.append(int(np.argmax(logits(model, ids)[-1])))
    return ids[len(token_ids) :]


_RELEASE_NAMES = (
    ("model.embed_tokens.", "embed."),
    ("lm_head.", "head."),
    ("model.hc_head.hc_", "hc_head_"),
    ("model.", ""),
    (".self_attn.compressor.indexer.scorer.weights_proj.", ".attn.indexer.weights_proj."),
    (".self_attn.compressor.indexer.q_b_proj.", ".attn.indexer.wq_b."),
    (".self_attn.compressor.indexer.", ".attn.indexer.compressor."),
    (".self_attn.", ".attn."),
    (".attn.kv_norm.", ".attn.KV_NORM."),
    (".kv_norm.", ".norm."),
    (".attn.KV_NORM.", ".attn.kv_norm."),
    (".q_a_proj.", ".wq_a."),
    (".q_a_norm.", ".q_norm."),
    (".q_b_proj.", ".wq_b."),
    ("compressor.gate_proj.", "compressor.wgate."),
    (".kv_proj.", ".wkv."),
    (".position_bias", ".ape"),
    (".o_a_proj.", ".wo_a."),
    (".o_b_proj.", ".wo_b."),
    (".sinks", ".attn_sink"),
    (".input_layernorm.", ".attn_norm."),
    (".post_attention_layernorm.", ".ffn_norm."),
    (".attn_hc.", ".hc_attn_"),
    (".ffn_hc.", ".hc_ffn_"),
    (".mlp.", ".ffn."),
    (".gate.e_score_correction_bias", ".gate.bias"),
    (".shared_experts.gate_proj.", ".shared_experts.w1."),
    (".shared_experts.down_proj.", ".shared_experts.w2."),
    (".shared_experts.up_proj.", ".shared_experts.w3."),
)


def release_parameters(model: DeepseekV4ForCausalLM) -> dict[str, np.ndarray]:
    """The model's parameters in float64 under release names, experts one by one (checkpoint spec 2 and 4)."""
    params: dict[str, np.ndarray] = {}
    for module_name, tensor in model.state_dict().items():
        name = module_name
        for old, new in _RELEASE_NAMES:
            name = name.removeprefix(old) if new == "" and name.startswith(old) else name.replace(old, new or old)
        value = (tensor.double() if tensor.is_floating_point() else tensor).numpy()
        if name.endswith(".experts.gate_up_proj"):
            inner = value.shape[1] // 2
            for one, both in enumerate(value):
                params[name.replace("gate_up_proj", f"{one}.w1.weight")] = both[:inner]
                params[name.replace("gate_up_proj", f"{one}.w3.weight")] = both[inner:]
        elif name.endswith(".experts.down_proj"):
            for one, down in enumerate(value):
                params[name.replace("down_proj", f"{one}.w2.weight")] = down
        else:
            params[name] = value
    return params
