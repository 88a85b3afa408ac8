"""A rank's place in its tensor-parallel group, and which group sizes a model allows. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from dsv4dist.config.model import ModelConfig
from dsv4dist.errors import ConfigError


@dataclass(frozen=True)
class TpInfo:
    """Rank `rank` of `size` tensor-parallel ranks."""

    rank: int = 0
    size: int = 1

    def split(self, total: int) -> slice:
        """This rank's even share of `total` items; `total` must be a multiple of the group size."""
        assert total % self.size == 0, f"{total} items do not divide over {self.size} ranks"
        share = total // self.size
        return slice(self.rank * share, (self.rank + 1) * share)


def divided_sizes(config: ModelConfig) -> dict[str, int]:
    """The sizes that tensor parallelism splits evenly, by their config.json names."""
    return {
        "num_attention_heads": config.num_attention_heads,
        "o_groups": config.o_groups,
        "moe_intermediate_size": config.moe_intermediate_size,
        "vocab_size": config.vocab_size,
    }


def allowed_tp_sizes(config: ModelConfig) -> list[int]:
    """Every tensor-parallel size that divides all of `divided_sizes`, ascending."""
    sizes = divided_sizes(config)
    return [n for n in range(1, min(sizes.values()) + 1) if all(size % n == 0 for size in sizes.values())]


def check_tp_size(config: ModelConfig, tp_size: int) -> None:
    """Refuse a group size that does not divide the model.  Raises: ConfigError naming each size and the choices."""
    bad = [f"{name} = {size}" for name, size in divided_sizes(config).items() if tp_size < 1 or size % tp_size]
    if bad:
        choices = ", ".join(map(str, allowed_tp_sizes(config)))
        raise ConfigError(f"tensor parallel size {tp_size} does not divide {', '.join(bad)}; use one of {choices}")
