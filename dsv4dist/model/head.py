"""The two ends of the model, both split over the vocabulary: token ids to rows, streams to logits."""

from __future__ import annotations

import torch

from dsv4dist.config.model import ModelConfig
from dsv4dist.distributed.comm import Communicator
from dsv4dist.kernels.ops import Ops
from dsv4dist.kernels.reference.norm import rms_norm
from dsv4dist.model.hyper_connection import weighted_sum


class Embedding:
    """This rank's rows of the embedding, for the tokens from `first_token` on."""

    def __init__(self, weight: torch.Tensor, first_token: int, comm: Communicator) -> None:
        self.weight, self.first_token, self.comm = weight, first_token, comm

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids [T] -> rows [T, Hd], the same on every rank."""
        local = token_ids - self.first_token
        mine = (local >= 0) & (local < self.weight.shape[0])
        rows = self.weight[torch.where(mine, local, 0)]
        return self.comm.all_reduce(torch.where(mine.unsqueeze(-1), rows, 0))


class Head:
    """Streams to logits (checkpoint spec 6): mix the streams, norm, project on this rank's tokens, gather.

    `weights` holds `hc_head_fn`, `hc_head_base`, `hc_head_scale` and `norm.weight`; a draft layer has its own, while it
    shares `head`.
    """

    def __init__(
        self, config: ModelConfig, weights: dict[str, torch.Tensor], head: torch.Tensor, comm: Communicator, ops: Ops
    ) -> None:
        self.fn, self.base, self.scale = (weights[f"hc_head_{part}"] for part in ("fn", "base", "scale"))
        self.norm, self.head = weights["norm.weight"], head
        self.hc_eps, self.eps, self.comm, self.ops = config.hc_eps, config.rms_norm_eps, comm, ops

    def __call__(self, streams: torch.Tensor) -> torch.Tensor:
        """fp32 logits [rows, vocabulary] of `streams` [rows, m, Hd], the same on every rank."""
        mixed = rms_norm(streams.float().flatten(1), None, self.eps) @ self.fn.T
        pre = torch.sigmoid(mixed * self.scale + self.base) + self.hc_eps
        x = self.ops.rms_norm(weighted_sum(streams, pre), self.norm, self.eps)
        return self.comm.all_gather_last(x.float() @ self.head.T)
