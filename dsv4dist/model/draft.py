"""The draft layer `mtp.0`: from the streams at a token and the next token, the one after (checkpoint spec 6)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dsv4dist.cache.pool import LayerCaches
from dsv4dist.config.model import ModelConfig
from dsv4dist.distributed.comm import Communicator
from dsv4dist.kernels.ops import Ops
from dsv4dist.model.head import Embedding, Head
from dsv4dist.step.metadata import StepMetadata


class DraftLayer:
    """One window-only layer with projections of its own; it shares the embedding and the head's matrix."""

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, torch.Tensor],
        layer: Callable[[torch.Tensor, StepMetadata, LayerCaches], torch.Tensor],
        embed: Embedding,
        head: Head,
        comm: Communicator,
        ops: Ops,
    ) -> None:
        self.e_proj, self.h_proj = weights["e_proj.weight"], weights["h_proj.weight"]
        self.enorm, self.hnorm = weights["enorm.weight"], weights["hnorm.weight"]
        self.layer, self.embed, self.ops, self.eps = layer, embed, ops, config.rms_norm_eps
        self.head = Head(config, weights, head.head, comm, ops)

    def forward(self, streams: torch.Tensor, step: StepMetadata, caches: LayerCaches) -> torch.Tensor:
        """Streams of the step's tokens [T, m, Hd] -> the layer's streams; writes its window cache.

        `step.token_ids` are those of the tokens that follow; positions and slots are those of the tokens themselves.
        """
        following = self.ops.rms_norm(self.embed(step.token_ids), self.enorm, self.eps) @ self.e_proj.T
        carried = self.ops.rms_norm(streams, self.hnorm, self.eps) @ self.h_proj.T
        return self.layer(following.unsqueeze(1) + carried, step, caches)
