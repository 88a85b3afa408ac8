"""The indexer of a CSA layer: keeps its own compressed keys and selects the entries that a query attends to."""

from __future__ import annotations

import torch

from dsv4dist.config.model import LayerKind, ModelConfig
from dsv4dist.kernels.ops import Ops
from dsv4dist.kernels.paged_cache import PagedCache
from dsv4dist.layers.compressor import Compressor
from dsv4dist.layers.weights import below
from dsv4dist.step.metadata import CompressedMetadata, StepMetadata


class Indexer:
    """Attention spec 1.6. Replicated: every rank scores all index heads, and so selects the same entries."""

    def __init__(self, config: ModelConfig, weights: dict[str, torch.Tensor], cos_sin: torch.Tensor, ops: Ops) -> None:
        self.weights_proj = weights["weights_proj.weight"]
        own = below(weights, "compressor.")
        self.compressor = Compressor(own, LayerKind.CSA, cos_sin, config.rms_norm_eps, ops)
        self.config, self.cos_sin, self.ops = config, cos_sin, ops

    def __call__(
        self,
        q: torch.Tensor,
        head_weights: torch.Tensor,
        step: StepMetadata,
        compressed: CompressedMetadata,
        keys: PagedCache,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The slots of the selected entries, (indices, indptr); `compressor` has stored this step's keys.

        q [T, Hi * Di], products with `wq_b`; head_weights fp32 [T, Hi], with `weights_proj`
        """
        q = q.view(len(q), self.config.index_n_heads, self.config.index_head_dim)
        q, head_weights = self.ops.indexer_query(q, head_weights, step.positions, self.cos_sin, keys.fp8_format)
        key_list: tuple[torch.Tensor, torch.Tensor] = self.ops.select_key_list(
            q,
            head_weights,
            keys,
            compressed.table,
            step.token_to_req,
            compressed.visible_lens,
            self.config.index_topk,
            compressed.max_visible,
        )
        return key_list
