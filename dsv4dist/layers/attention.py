"""One attention layer (attention spec 1.2, flow 5.2); the kinds differ only in the compressed entries a query sees."""

from __future__ import annotations

import torch

from dsv4dist.cache.pool import LayerCaches
from dsv4dist.config.model import LayerKind, ModelConfig
from dsv4dist.distributed.comm import Communicator
from dsv4dist.kernels.ops import Ops
from dsv4dist.kernels.segments import Segment
from dsv4dist.layers.compressor import Compressor
from dsv4dist.layers.indexer import Indexer
from dsv4dist.layers.weights import below
from dsv4dist.step.metadata import StepMetadata


class Attention:
    """Local heads and output groups of one layer; `wq_a`, `wkv`, compressor and indexer are replicated."""

    def __init__(
        self,
        config: ModelConfig,
        kind: LayerKind,
        weights: dict[str, torch.Tensor],
        cos_sin: torch.Tensor,
        ops: Ops,
        comm: Communicator,
    ) -> None:
        self.config, self.kind, self.cos_sin, self.ops, self.comm = config, kind, cos_sin, ops, comm
        self.wq_a_wkv = torch.cat((weights["wq_a.weight"], weights["wkv.weight"]))
        self.q_norm, self.kv_norm = weights["q_norm.weight"], weights["kv_norm.weight"]
        self.wq_b = weights["wq_b.weight"]
        self.attn_sink = weights["attn_sink"]
        self.wo_a = weights["wo_a.weight"].view(-1, config.o_lora_rank, config.group_input_size)
        self.wo_b = weights["wo_b.weight"]
        self.compressor = self.indexer = None
        if kind is not LayerKind.SWA:
            self.compressor = Compressor(below(weights, "compressor."), kind, cos_sin, config.rms_norm_eps, ops)
        if kind is LayerKind.CSA:
            self.indexer = Indexer(config, below(weights, "indexer."), cos_sin, ops)

    def __call__(self, x: torch.Tensor, step: StepMetadata, caches: LayerCaches) -> torch.Tensor:
        """x [T, Hd], normed -> y [T, Hd], summed over ranks; writes this step's rows of the layer's caches."""
        eps = self.config.rms_norm_eps
        qr, kv = self.ops.qr_kv_norm(x @ self.wq_a_wkv.T, self.q_norm, self.kv_norm, eps)
        q = (qr @ self.wq_b.T).view(x.shape[0], len(self.wq_b) // self.config.head_dim, self.config.head_dim)
        q = self.ops.q_rope_kv_insert(q, kv, step.positions, self.cos_sin, caches.window, step.window_slots, eps)
        out = self.ops.sparse_attention(
            q,
            Segment(caches.window, *step.window_key_list),
            self._compressed_segment(x, qr, step, caches),
            self.attn_sink,
            self.config.softmax_scale,
            positions=step.positions,
            cos_sin=self.cos_sin,
        )
        return self._project(out)

    def _compressed_segment(
        self, x: torch.Tensor, qr: torch.Tensor, step: StepMetadata, caches: LayerCaches
    ) -> Segment | None:
        """Store this step's compressed entries and list those that each query attends to."""
        if self.compressor is None:
            return None
        compressed = step.compressed[self.kind]
        assert caches.entries is not None, "a compressed layer has an entry cache"
        assert caches.state is not None, "a compressed layer has a state cache"
        self.compressor(x, step, compressed, caches.state, caches.entries)
        if self.indexer is None:
            assert compressed.key_list is not None, "HCA lists its entries in the step metadata"
            return Segment(caches.entries, *compressed.key_list)
        assert caches.index_keys is not None, "a CSA layer has an index key cache"
        assert caches.index_state is not None, "a CSA layer has an index state cache"
        selected = self.indexer(x, qr, step, compressed, caches.index_keys, caches.index_state)
        return Segment(caches.entries, *self.ops.entry_key_list(compressed.table, step.token_to_req, selected))

    def _project(self, out: torch.Tensor) -> torch.Tensor:
        """Grouped output projection of out [T, h, D]; each rank holds whole groups, the sum over ranks is y."""
        groups = self.wo_a.shape[0]
        grouped = out.reshape(out.shape[0], groups, self.config.group_input_size)
        z = torch.einsum("tgi,goi->tgo", grouped, self.wo_a).flatten(1)
        return self.comm.all_reduce(z @ self.wo_b.T)
