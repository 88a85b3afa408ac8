"""The mixture of experts: router, routed experts, shared expert (checkpoint spec 6)."""

from __future__ import annotations

import torch
from torch.nn.functional import silu, softplus

from dsv4dist.config.model import ModelConfig
from dsv4dist.distributed.comm import Communicator
from dsv4dist.layers.weights import below


class MixtureOfExperts:
    """Every rank holds a slice of the inner dimension of every expert; one all-reduce sums routed and shared parts."""

    def __init__(self, config: ModelConfig, weights: dict[str, torch.Tensor], comm: Communicator) -> None:
        self.config, self.comm = config, comm
        self.gate = weights["gate.weight"]
        self.bias = weights.get("gate.bias")
        self.tid2eid = weights.get("gate.tid2eid")
        experts, shared = below(weights, "experts."), below(weights, "shared_experts.")
        self.w1, self.w2, self.w3 = (experts[f"w{i}.weight"] for i in (1, 2, 3))
        self.shared_w1, self.shared_w2, self.shared_w3 = (shared[f"w{i}.weight"] for i in (1, 2, 3))

    def __call__(self, x: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """x [T, Hd], normed; token_ids [T] -> y [T, Hd], summed over ranks."""
        chosen, routing = self._route(x, token_ids)
        y = self._expert(x, self.shared_w1, self.shared_w2, self.shared_w3).float()
        for expert in torch.unique(chosen).tolist():
            rows, place = torch.nonzero(chosen == expert, as_tuple=True)
            part = self._expert(x[rows], self.w1[expert], self.w2[expert], self.w3[expert])
            y.index_add_(0, rows, part.float() * routing[rows, place].unsqueeze(-1))
        return self.comm.all_reduce(y.to(x.dtype))

    def _route(self, x: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts of each token [T, k] and their fp32 weights; ties go to the lowest expert."""
        scores = softplus(x.float() @ self.gate.T).sqrt()
        if self.tid2eid is not None:
            chosen = self.tid2eid[token_ids]
        else:
            assert self.bias is not None, "a layer routes by token id or by biased scores"
            order = torch.sort(scores + self.bias, dim=-1, descending=True, stable=True).indices
            chosen = order[:, : self.config.num_experts_per_tok]
        routing = scores.gather(1, chosen)
        routing = routing / (routing.sum(dim=-1, keepdim=True) + 1e-20) * self.config.routed_scaling_factor
        return chosen, routing

    def _expert(self, x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, w3: torch.Tensor) -> torch.Tensor:
        limit = self.config.swiglu_limit
        gate, up = (x @ w1.T).clamp(max=limit), (x @ w3.T).clamp(-limit, limit)
        return (silu(gate) * up) @ w2.T
