"""Products with weight matrices, in the run's dtype or over block-scaled fp8 weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dsv4dist.kernels.ops import Ops
from dsv4dist.kernels.paged_cache import Fp8Format


class Linear:
    """One matrix [N, K], or one for each of several groups, in the run's dtype or in fp8 with block scales."""

    def __init__(self, weights: dict[str, torch.Tensor], names: Sequence[str], ops: Ops, groups: int = 1) -> None:
        """The matrices `names` of `weights` one below the other, cut into `groups` of equal rows.

        `<name>.weight` comes with `<name>.scale`, one value per 128 x 128 block, where it is fp8.
        """
        weight = torch.cat([weights[f"{name}.weight"] for name in names])
        self.weight = weight.view(groups, -1, weight.shape[1])
        self.scale, self._ops = None, ops
        if f"{names[0]}.scale" in weights:
            scale = torch.cat([weights[f"{name}.scale"] for name in names])
            self.scale = scale.view(groups, -1, scale.shape[1])
            self._fp8_format = next(one for one in Fp8Format if one.torch_dtype == weight.dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, K] -> [T, N]; with groups, x [T, groups, K] -> [T, groups * N]."""
        if self.scale is not None:
            grouped = x if x.dim() == 3 else x.unsqueeze(1)
            y: torch.Tensor = self._ops.fp8_weight_linear(grouped, self.weight, self.scale, self._fp8_format)
            return y.flatten(1)
        if x.dim() == 2:
            return x @ self.weight[0].T
        return torch.einsum("tgi,goi->tgo", x, self.weight).flatten(1)
