"""One attention layer (attention spec 1.2, flow 5.2); the kinds differ only in the compressed entries a query sees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from dsv4dist.cache.pool import LayerCaches
from dsv4dist.config.model import LayerKind, ModelConfig
from dsv4dist.distributed.comm import Communicator
from dsv4dist.kernels.ops import Ops
from dsv4dist.kernels.segments import Segment
from dsv4dist.layers.compressor import Compressor
from dsv4dist.layers.indexer import Indexer
from dsv4dist.layers.linear import Linear
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
        # Both kinds of query come from the same low-rank form: one product.
        names = ("wq_b", "indexer.wq_b") if kind is LayerKind.CSA else ("wq_b",)
        self.wq_b = Linear(weights, names, ops)
        self.num_query_channels = len(weights["wq_b.weight"])
        self.attn_sink = weights["attn_sink"]
        groups = len(weights["wo_a.weight"]) // config.o_lora_rank
        self.wo_a = Linear(weights, ("wo_a",), ops, groups)
        self.wo_b = Linear(weights, ("wo_b",), ops)
        self.compressor = self.indexer = None
        if kind is not LayerKind.SWA:
            self.compressor = Compressor(below(weights, "compressor."), kind, cos_sin, config.rms_norm_eps, ops)
        if kind is LayerKind.CSA:
            self.indexer = Indexer(config, below(weights, "indexer."), cos_sin, ops)
        self.projections = self._fused_projections()

    def __call__(self, x: torch.Tensor, step: StepMetadata, caches: LayerCaches) -> torch.Tensor:
        """x [T, Hd], normed -> y [T, Hd], summed over ranks; writes this step's rows of the layer's caches."""
        (q, index_q, kv), leftovers = self.overlap.run(
            lambda: self._queries(x), self._compressions(x, step, caches), num_tokens=len(x)
        )
        compressed = self.overlap.beside(lambda: self._compressed_segment(index_q, leftovers, step, caches))
        eps = self.config.rms_norm_eps
        q = self.ops.q_rope_kv_insert(q, kv, step.positions, self.cos_sin, caches.window, step.window_slots, eps)
        self.overlap.join()
        out = self.ops.sparse_attention(
            q,
            Segment(caches.window, *step.window_key_list),
            compressed,
            self.attn_sink,
            self.config.softmax_scale,
            positions=step.positions,
            cos_sin=self.cos_sin,
        )
        return self._project(out)

    def _queries(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [T, h, D] and the indexer's [T, Hi * Di], not rotated yet, and the normed keys [T, D]."""
        qr, kv = self.ops.qr_kv_norm(self.wq_a_wkv(x), self.q_norm, self.kv_norm, self.config.rms_norm_eps)
        both = self.wq_b(qr)
        q, index_q = both[:, : self.num_query_channels], both[:, self.num_query_channels :]
        return q.unflatten(1, (-1, self.config.head_dim)), index_q, kv

    def _compressors(self) -> list[Compressor]:
        """The layer's own, and its indexer's."""
        own = [] if self.compressor is None else [self.compressor]
        return own if self.indexer is None else [*own, self.indexer.compressor]

    def _fused_projections(self) -> list[torch.Tensor]:
        """What each compressor multiplies x by, as parts of one matrix (attention spec 6.6).

        The last one also holds the indexer's `weights_proj`.
        """
        compressors = self._compressors()
        if not compressors:
            return []
        last = [] if self.indexer is None else [self.indexer.weights_proj]
        self.fused_projections = torch.cat([*(compressor.wkv_wgate for compressor in compressors), *last])
        sizes = [compressor.width for compressor in compressors]
        sizes[-1] += sum(map(len, last))
        parts = list(self.fused_projections.split(sizes))
        for compressor, part in zip(compressors, parts, strict=True):
            compressor.wkv_wgate = part[: compressor.width]
        if self.indexer is not None:
            self.indexer.weights_proj = parts[-1][self.indexer.compressor.width :]
        return parts

    def _compressions(
        self, x: torch.Tensor, step: StepMetadata, caches: LayerCaches
    ) -> list[Callable[[], torch.Tensor]]:
        """One chain per compressor, from x to stored entries; each returns what else its projection yields.

        They share one product where they do not overlap.
        """
        stores = ((caches.state, caches.entries), (caches.index_state, caches.index_keys))
        shared: Sequence[torch.Tensor] | None = None
        if self.projections and not self.overlap.is_open:
            sizes = [len(part) for part in self.projections]
            shared = self.ops.product_in_fp32(x, self.fused_projections).split(sizes, dim=1)

        def chain(which: int, compressor: Compressor) -> torch.Tensor:
            state, entries = stores[which]
            assert state is not None, "a compressed layer has a state cache"
            assert entries is not None, "a compressed layer has an entry cache"
            projected = self.ops.product_in_fp32(x, self.projections[which]) if shared is None else shared[which]
            compressor(projected[:, : compressor.width], step, step.compressed[self.kind], state, entries)
            return projected[:, compressor.width :]

        return [partial(chain, which, compressor) for which, compressor in enumerate(self._compressors())]

    def _compressed_segment(
        self, index_q: torch.Tensor, leftovers: list[torch.Tensor], step: StepMetadata, caches: LayerCaches
    ) -> Segment | None:
        """List the compressed entries that each query attends to; this step's are stored.

        leftovers  as `_compressions` gives them; the last of a CSA layer holds the index heads' weights, fp32 [T, Hi]
        """
        if self.compressor is None:
            return None
        compressed = step.compressed[self.kind]
        assert caches.entries is not None, "a compressed layer has an entry cache"
        if self.indexer is None:
            assert compressed.key_list is not None, "HCA lists its entries in the step metadata"
            return Segment(caches.entries, *compressed.key_list)
        assert caches.index_keys is not None, "a CSA layer has an index key cache"
        return Segment(caches.entries, *self.indexer(index_q, leftovers[-1], step, compressed, caches.index_keys))

    def _project(self, out: torch.Tensor) -> torch.Tensor:
        """Grouped output projection of out [T, h, D]; each rank holds whole groups, the sum over ranks is y."""
        z = self.wo_a(out.flatten(1).unflatten(1, (-1, self.config.group_input_size)))
        return self.comm.all_reduce(self.wo_b(z))
