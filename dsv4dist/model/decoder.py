"""The model: token ids in, logits out, for one rank's share of the weights."""

from __future__ import annotations

import torch

from dsv4dist.cache.pool import LayerCaches
from dsv4dist.config.model import LayerKind, ModelConfig
from dsv4dist.distributed.comm import Communicator
from dsv4dist.distributed.tp import TpInfo
from dsv4dist.kernels.ops import Ops
from dsv4dist.kernels.reference.norm import rms_norm
from dsv4dist.layers.attention import Attention
from dsv4dist.layers.rotary import rotary_table
from dsv4dist.layers.weights import below
from dsv4dist.model.hyper_connection import HyperConnection, weighted_sum
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
    ) -> None:
        self.ops, self.eps = ops, config.rms_norm_eps
        self.attn_norm, self.ffn_norm = weights["attn_norm.weight"], weights["ffn_norm.weight"]
        self.hc_attn, self.hc_ffn = (
            HyperConnection(config, *(weights[f"hc_{block}_{part}"] for part in ("fn", "base", "scale")))
            for block in ("attn", "ffn")
        )
        self.attention = Attention(config, kind, below(weights, "attn."), cos_sin, ops, comm)
        self.moe = MixtureOfExperts(config, below(weights, "ffn."), comm)

    def __call__(self, streams: torch.Tensor, step: StepMetadata, caches: LayerCaches) -> torch.Tensor:
        x, post, comb = self.hc_attn.mix_in(streams)
        y = self.attention(self.ops.rms_norm(x, self.attn_norm, self.eps), step, caches)
        streams = self.hc_attn.mix_out(streams, y, post, comb)
        x, post, comb = self.hc_ffn.mix_in(streams)
        y = self.moe(self.ops.rms_norm(x, self.ffn_norm, self.eps), step.token_ids)
        return self.hc_ffn.mix_out(streams, y, post, comb)


class Model:
    """Embedding, layers and head. Embedding and head are split over the vocabulary; logits are gathered."""

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, torch.Tensor],
        tp: TpInfo,
        comm: Communicator,
        ops: Ops,
        max_model_len: int,
    ) -> None:
        self.config, self.comm, self.ops = config, comm, ops
        self.vocabulary = tp.split(config.vocab_size)
        self.embed, self.norm, self.head = weights["embed.weight"], weights["norm.weight"], weights["head.weight"]
        self.hc_fn, self.hc_base, self.hc_scale = (weights[f"hc_head_{part}"] for part in ("fn", "base", "scale"))
        tables = {
            kind: rotary_table(rotary, config.rope_head_dim, max_model_len, self.embed.device)
            for kind, rotary in ((LayerKind.SWA, config.main_rope), (LayerKind.CSA, config.compress_rope))
        }
        tables[LayerKind.HCA] = tables[LayerKind.CSA]
        self.layers = [
            DecoderLayer(config, kind, below(weights, f"layers.{index}."), tables[kind], ops, comm)
            for index, kind in enumerate(config.layer_kinds)
        ]

    def forward(self, step: StepMetadata, caches: list[LayerCaches]) -> torch.Tensor:
        """Run all layers on the step's tokens; returns the streams [T, m, Hd] and writes the caches."""
        streams = self._embed(step.token_ids).unsqueeze(1).expand(-1, self.config.hc_mult, -1)
        for layer, layer_caches in zip(self.layers, caches, strict=True):
            streams = layer(streams, step, layer_caches)
        return streams

    def logits(self, streams: torch.Tensor) -> torch.Tensor:
        """fp32 logits [rows, vocabulary] of the rows of `streams` [rows, m, Hd], the same on every rank."""
        mixed = rms_norm(streams.float().flatten(1), None, self.config.rms_norm_eps) @ self.hc_fn.T
        pre = torch.sigmoid(mixed * self.hc_scale + self.hc_base) + self.config.hc_eps
        x = self.ops.rms_norm(weighted_sum(streams, pre), self.norm, self.config.rms_norm_eps)
        return self.comm.all_gather_last(x.float() @ self.head.T)

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        local = token_ids - self.vocabulary.start
        mine = (local >= 0) & (local < self.embed.shape[0])
        rows = self.embed[torch.where(mine, local, 0)]
        return self.comm.all_reduce(torch.where(mine.unsqueeze(-1), rows, 0))
