"""Hyper-connections: several residual streams, mixed before and after each block (checkpoint spec 6)."""

from __future__ import annotations

import torch

from dsv4dist.config.model import ModelConfig
from dsv4dist.kernels.reference.norm import rms_norm


class HyperConnection:
    """The mixing around one block. Streams are [T, m, Hd]; the mixing weights are computed in fp32 from all of them."""

    def __init__(self, config: ModelConfig, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor) -> None:
        self.fn, self.base, self.scale = fn, base, scale
        self.streams, self.iterations = config.hc_mult, config.hc_sinkhorn_iters
        self.hc_eps, self.norm_eps = config.hc_eps, config.rms_norm_eps

    def mix_in(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The block's input [T, Hd] in the streams' dtype, and what `mix_out` needs: post [T, m], comb [T, m, m]."""
        m = self.streams
        mixed = rms_norm(streams.float().flatten(1), None, self.norm_eps) @ self.fn.T
        pre, post, comb = torch.split(mixed, [m, m, m * m], dim=-1)
        base_pre, base_post, base_comb = torch.split(self.base, [m, m, m * m])
        pre = torch.sigmoid(pre * self.scale[0] + base_pre) + self.hc_eps
        post = 2 * torch.sigmoid(post * self.scale[1] + base_post)
        comb = (comb * self.scale[2] + base_comb).view(-1, m, m).softmax(dim=-1) + self.hc_eps
        comb = comb / (comb.sum(dim=-2, keepdim=True) + self.hc_eps)
        for _ in range(self.iterations - 1):
            comb = comb / (comb.sum(dim=-1, keepdim=True) + self.hc_eps)
            comb = comb / (comb.sum(dim=-2, keepdim=True) + self.hc_eps)
        return weighted_sum(streams, pre), post, comb

    def mix_out(self, streams: torch.Tensor, y: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
        """The next streams: stream k gets post_k * y + sum over j of comb[j, k] * stream_j."""
        carried = torch.einsum("tjk,tjh->tkh", comb, streams.float())
        return (carried + post.unsqueeze(-1) * y.float().unsqueeze(1)).to(streams.dtype)


def weighted_sum(streams: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sum the streams [T, m, Hd] with weights [T, m]: [T, Hd] in the streams' dtype."""
    return torch.einsum("tm,tmh->th", weights, streams.float()).to(streams.dtype)
