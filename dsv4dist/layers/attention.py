"""One attention layer (attention spec 1.2, flow 5.2); the kinds differ only in the compressed entries a query sees."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from dsv4dist.cache.pool import LayerCaches
from dsv4dist.config.model import LayerKind, ModelConfig
from dsv4dist.distributed.comm import Communicator
from dsv4dist.kernels.ops import Ops
from dsv4dist.kernels.paged_cache import PagedCache
from dsv4dist.kernels.segments import Segment
from dsv4dist.layers.compressor import Compressor
from dsv4dist.layers.indexer import Indexer
from dsv4dist.layers.linear import Linear, product_in_fp32
from dsv4dist.layers.overlap import Overlap
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
        overlap: Overlap,
    ) -> None:
        self.config, self.kind, self.cos_sin, self.ops, self.comm = config, kind, cos_sin, ops, comm
        self.overlap = overlap
        self.wq_a_wkv = Linear(weights, ("wq_a", "wkv"), ops)
        self.q_norm, self.kv_norm = weights["q_norm.weight"], weights["kv_norm.weight"]
        self.wq_b = Linear(weights, ("wq_b",), ops)
        self.attn_sink = weights["attn_sink"]
        groups = len(weights["wo_a.weight"]) // config.o_lora_rank
        self.wo_a = Linear(weights, ("wo_a",), ops, groups)
        self.wo_b = Linear(weights, ("wo_b",), ops)
        self.compressor = self.indexer = None
        if kind is not LayerKind.SWA:
            self.compressor = Compressor(below(weights, "compressor."), kind, cos_sin, config.rms_norm_eps, ops)
        if kind is LayerKind.CSA:
            self.indexer = Indexer(config, below(weights, "indexer."), cos_sin, ops)
        self._fuse_compressors()

    def __call__(self, x: torch.Tensor, step: StepMetadata, caches: LayerCaches) -> torch.Tensor:
        """x [T, Hd], normed -> y [T, Hd], summed over ranks; writes this step's rows of the layer's caches."""
        q, qr = self.overlap.run(
            lambda: self._queries(x, step, caches), self._compressions(x, step, caches), num_tokens=len(x)
        )
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

    def _queries(self, x: torch.Tensor, step: StepMetadata, caches: LayerCaches) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated queries [T, h, D] and their low-rank form [T, Lq]; stores this step's window rows."""
        eps = self.config.rms_norm_eps
        qr, kv = self.ops.qr_kv_norm(self.wq_a_wkv(x), self.q_norm, self.kv_norm, eps)
        q = self.wq_b(qr).view(x.shape[0], -1, self.config.head_dim)
        q = self.ops.q_rope_kv_insert(q, kv, step.positions, self.cos_sin, caches.window, step.window_slots, eps)
        return q, qr

    def _compressions(self, x: torch.Tensor, step: StepMetadata, caches: LayerCaches) -> list[Callable[[], None]]:
        """One chain per compressor, from x to stored entries. They share one product where they do not overlap."""
        stores: list[tuple[Compressor, PagedCache | None, PagedCache | None]] = []
        if self.compressor is not None:
            stores.append((self.compressor, caches.state, caches.entries))
        if self.indexer is not None:
            stores.append((self.indexer.compressor, caches.index_state, caches.index_keys))
        if not stores:
            return []
        sizes = [len(compressor.wkv_wgate) for compressor, _, _ in stores]
        shared = None if self.overlap.is_open else product_in_fp32(x, self.compressor_weights).split(sizes, dim=1)

        def chain(which: int) -> None:
            compressor, state, entries = stores[which]
            assert state is not None, "a compressed layer has a state cache"
            assert entries is not None, "a compressed layer has an entry cache"
            kv_score = product_in_fp32(x, compressor.wkv_wgate) if shared is None else shared[which]
            compressor(kv_score, step, step.compressed[self.kind], state, entries)

        return [partial(chain, which) for which in range(len(stores))]

    def _fuse_compressors(self) -> None:
        """Keep the weights of the layer's compressors as parts of one matrix (attention spec 6.6)."""
        compressors = [] if self.compressor is None else [self.compressor]
        if self.indexer is not None:
            compressors.append(self.indexer.compressor)
        if compressors:
            self.compressor_weights = torch.cat([one.wkv_wgate for one in compressors])
            parts = self.compressor_weights.split([len(one.wkv_wgate) for one in compressors])
            for one, part in zip(compressors, parts, strict=True):
                one.wkv_wgate = part

    def _compressed_segment(
        self, x: torch.Tensor, qr: torch.Tensor, step: StepMetadata, caches: LayerCaches
    ) -> Segment | None:
        """List the compressed entries that each query attends to; this step's are stored."""
        if self.compressor is None:
            return None
        compressed = step.compressed[self.kind]
        assert caches.entries is not None, "a compressed layer has an entry cache"
        if self.indexer is None:
            assert compressed.key_list is not None, "HCA lists its entries in the step metadata"
            return Segment(caches.entries, *compressed.key_list)
        assert caches.index_keys is not None, "a CSA layer has an index key cache"
        selected = self.indexer(x, qr, step, compressed, caches.index_keys)
        return Segment(caches.entries, *self.ops.entry_key_list(compressed.table, step.token_to_req, selected))

    def _project(self, out: torch.Tensor) -> torch.Tensor:
        """Grouped output projection of out [T, h, D]; each rank holds whole groups, the sum over ranks is y."""
        z = self.wo_a(out.reshape(out.shape[0], -1, self.config.group_input_size))
        return self.comm.all_reduce(self.wo_b(z))
