"""The model: token ids in, logits out, for one rank's share of the weights."""

from __future__ import annotations

import torch

from dsv4dist.cache.pool import LayerCaches
from dsv4dist.config.model import LayerKind, ModelConfig
from dsv4dist.config.runtime import MAX_SPECULATIVE_TOKENS
from dsv4dist.distributed.comm import Communicator
from dsv4dist.distributed.tp import TpInfo
from dsv4dist.kernels.ops import Ops
from dsv4dist.layers.attention import Attention
from dsv4dist.layers.overlap import Overlap
from dsv4dist.layers.rotary import rotary_table
from dsv4dist.layers.weights import below
from dsv4dist.model.draft import DraftLayer
from dsv4dist.model.head import Embedding, Head
from dsv4dist.model.hyper_connection import HyperConnection
from dsv4dist.model.moe import MixtureOfExperts
from dsv4dist.step.metadata import StepMetadata


class DecoderLayer:
    """Attention and mixture of experts, each normed and inside its own hyper-connection."""

    def __init__(
        self,
        config: ModelConfig,
        kind: LayerKind,
        weights: dict[str, torch.Tensor],
        cos_sin: torch.Tensor,
        ops: Ops,
        comm: Communicator,
        overlap: Overlap,
    ) -> None:
        self.ops, self.eps = ops, config.rms_norm_eps
        self.attn_norm, self.ffn_norm = weights["attn_norm.weight"], weights["ffn_norm.weight"]
        self.hc_attn, self.hc_ffn = (
            HyperConnection(config, *(weights[f"hc_{block}_{part}"] for part in ("fn", "base", "scale")))
            for block in ("attn", "ffn")
        )
        self.attention = Attention(config, kind, below(weights, "attn."), cos_sin, ops, comm, overlap)
        self.moe = MixtureOfExperts(config, below(weights, "ffn."), comm, ops)

    def __call__(self, streams: torch.Tensor, step: StepMetadata, caches: LayerCaches) -> torch.Tensor:
        x, post, comb = self.hc_attn.mix_in(streams)
        y = self.attention(self.ops.rms_norm(x, self.attn_norm, self.eps), step, caches)
        streams = self.hc_attn.mix_out(streams, y, post, comb)
        x, post, comb = self.hc_ffn.mix_in(streams)
        y = self.moe(self.ops.rms_norm(x, self.ffn_norm, self.eps), step.token_ids)
        return self.hc_ffn.mix_out(streams, y, post, comb)


class Model:
    """Embedding, layers and head."""

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, torch.Tensor],
        tp: TpInfo,
        comm: Communicator,
        ops: Ops,
        max_model_len: int,
        num_draft_layers: int = 0,
        overlap: Overlap | None = None,
    ) -> None:
        self.config = config
        overlap = overlap or Overlap()
        self.embed = Embedding(weights["embed.weight"], tp.split(config.vocab_size).start, comm)
        self.head = Head(config, weights, weights["head.weight"], comm, ops)
        device = weights["embed.weight"].device
        num_positions = max_model_len + MAX_SPECULATIVE_TOKENS  # drafts may look past the last token
        draft_kinds = (LayerKind.SWA,) * num_draft_layers
        tables = {
            rotary: rotary_table(rotary, config.rope_head_dim, num_positions, device)
            for rotary in config.used_ropes(draft_kinds)
        }
        self.layers = [
            DecoderLayer(
                config, kind, below(weights, f"layers.{index}."), tables[config.rope_of(kind)], ops, comm, overlap
            )
            for index, kind in enumerate(config.layer_kinds)
        ]
        self.draft = None
        if num_draft_layers:
            own = below(weights, "mtp.0.")
            layer = DecoderLayer(config, LayerKind.SWA, own, tables[config.rope_of(LayerKind.SWA)], ops, comm, overlap)
            self.draft = DraftLayer(config, own, layer, self.embed, self.head, comm, ops)

    def forward(self, step: StepMetadata, caches: list[LayerCaches]) -> torch.Tensor:
        """Run all layers on the step's tokens; returns the streams [T, m, Hd] and writes the caches.

        `caches` are those of the layers in order; a draft layer's, which follow, are not used.
        """
        streams = self.embed(step.token_ids).unsqueeze(1).expand(-1, self.config.hc_mult, -1)
        for layer, layer_caches in zip(self.layers, caches, strict=False):
            streams = layer(streams, step, layer_caches)
        return streams
