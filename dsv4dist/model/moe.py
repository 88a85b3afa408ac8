"""The mixture of experts: router, routed experts, shared expert (checkpoint spec 6)."""

from __future__ import annotations

import torch
from torch.nn.functional import silu, softplus

from dsv4dist.config.model import ModelConfig
from dsv4dist.distributed.comm import Communicator
from dsv4dist.kernels.ops import Ops
from dsv4dist.layers.weights import below


class MixtureOfExperts:
    """Every rank holds a slice of the inner dimension of every expert; one all-reduce sums routed and shared parts."""

    def __init__(self, config: ModelConfig, weights: dict[str, torch.Tensor], comm: Communicator, ops: Ops) -> None:
        self.config, self.comm, self.ops = config, comm, ops
        self.gate = weights["gate.weight"]
        self.bias = weights.get("gate.bias")
        self.tid2eid = weights.get("gate.tid2eid")
        experts, shared = below(weights, "experts."), below(weights, "shared_experts.")
        self.w1, self.w2, self.w3 = (experts[f"w{i}.weight"] for i in (1, 2, 3))
        self.shared_w1, self.shared_w2, self.shared_w3 = (shared[f"w{i}.weight"] for i in (1, 2, 3))

    def __call__(self, x: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """x [T, Hd], normed; token_ids [T] -> y [T, Hd], summed over ranks."""
        chosen, routing = self._route(x, token_ids)
        shared = self._swiglu(x @ self.shared_w1.T, x @ self.shared_w3.T) @ self.shared_w2.T
        y = shared.float() + self._routed(x, chosen, routing)
        return self.comm.all_reduce(y.to(x.dtype))

    def _routed(self, x: torch.Tensor, chosen: torch.Tensor, routing: torch.Tensor) -> torch.Tensor:
        """The weighted sum of each token's chosen experts, fp32 [T, Hd]; nothing here is read on the host."""
        tokens, per_token = chosen.shape
        expert, order = chosen.flatten().sort(stable=True)
        ends = torch.searchsorted(expert, torch.arange(len(self.w1), device=x.device), right=True)
        rows = x[order // per_token]
        gate, up = (self.ops.grouped_matmul(rows, weight, ends) for weight in (self.w1, self.w3))
        out = self.ops.grouped_matmul(self._swiglu(gate, up), self.w2, ends)
        parts = torch.empty(out.shape, dtype=torch.float32, device=x.device)
        parts[order] = out.float() * routing.flatten()[order].unsqueeze(-1)
        return parts.view(tokens, per_token, x.shape[1]).sum(dim=1)

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

    def _swiglu(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        limit = self.config.swiglu_limit
        return silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
