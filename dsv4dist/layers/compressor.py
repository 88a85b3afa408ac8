"""The compressor of a layer, or of its indexer: projections to states, states to entries."""

from __future__ import annotations

import torch

from dsv4dist.config.model import LayerKind
from dsv4dist.kernels.ops import Ops
from dsv4dist.kernels.paged_cache import PagedCache
from dsv4dist.step.metadata import CompressedMetadata, StepMetadata


class Compressor:
    """Attention spec 1.5. Replicated on every rank; everything between the projections and the cache is fp32."""

    def __init__(
        self, weights: dict[str, torch.Tensor], kind: LayerKind, cos_sin: torch.Tensor, eps: float, ops: Ops
    ) -> None:
        self.wkv_wgate = torch.cat((weights["wkv.weight"], weights["wgate.weight"]))
        self.width = len(self.wkv_wgate)
        self.ape = weights["ape"]
        self.norm = weights["norm.weight"]
        self.kind, self.cos_sin, self.eps, self.ops = kind, cos_sin, eps, ops

    def __call__(
        self,
        kv_score: torch.Tensor,
        step: StepMetadata,
        compressed: CompressedMetadata,
        state: PagedCache,
        entries: PagedCache,
    ) -> None:
        """Save the states of this step's tokens, then store the entries that they complete.

        kv_score  fp32 [T, width]: the tokens times `wkv_wgate`, in any row stride
        """
        self.ops.compress_state(kv_score, self.ape, step.positions, state, compressed.state_slots)
        self.ops.compress_store(
            state,
            compressed.state_table,
            step.token_to_req,
            step.positions,
            compressed.state_slots,
            self.norm,
            self.cos_sin,
            entries,
            compressed.entry_slots,
            self.kind.compress_ratio,
            self.kind.overlap,
            self.eps,
        )
