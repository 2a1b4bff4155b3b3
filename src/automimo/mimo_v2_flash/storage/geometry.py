"""Rows of the q, k and v projections of every attention, and how tensor-parallel shards of a checkpoint cut them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from automimo.errors import CheckpointError
from automimo.mimo_v2_flash.config import MiMoV2FlashConfig

_ATTENTION = re.compile(r"model\.(?P<mtp>mtp\.)?layers\.(?P<index>\d+)\.self_attn$")


@dataclass(frozen=True)
class AttentionShape:
    """Heads of one attention and their widths; `q`, `k` and `v` are rows of its projections."""

    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int

    @property
    def q(self) -> int:
        return self.heads * self.head_dim

    @property
    def k(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def v(self) -> int:
        return self.kv_heads * self.v_head_dim

    @property
    def rows(self) -> int:
        return self.q + self.k + self.v

    def shard(self, tp: int) -> AttentionShape:
        """The part of one of `tp` shards. Raises CheckpointError unless both head counts are divisible."""
        if tp < 1 or self.heads % tp or self.kv_heads % tp:
            raise CheckpointError(
                f"{self.heads} query and {self.kv_heads} key-value heads are not divisible by {tp} checkpoint shards"
            )
        return AttentionShape(self.heads // tp, self.kv_heads // tp, self.head_dim, self.v_head_dim)


def attention_shape(config: MiMoV2FlashConfig, prefix: str) -> AttentionShape:
    """The shape of the attention whose keys start with `prefix` (`model.layers.3.self_attn`).

    MTP blocks are sliding ones. Raises CheckpointError for a layer that the config does not have.
    """
    match = _ATTENTION.match(prefix)
    if match is None:
        raise CheckpointError(f"{prefix} is no attention of a MiMo-V2 text stack")
    index = int(match["index"])
    if match["mtp"] is None and index >= config.num_hidden_layers:
        raise CheckpointError(f"{prefix}: config.json has num_hidden_layers {config.num_hidden_layers}")
    if match["mtp"] is not None or config.layer_types[index] == "sliding_attention":
        return sliding_shape(config)
    return full_shape(config)


def full_shape(config: MiMoV2FlashConfig) -> AttentionShape:
    """Attention of the full layers."""
    return AttentionShape(config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.v_head_dim)


def sliding_shape(config: MiMoV2FlashConfig) -> AttentionShape:
    """Attention of the sliding layers and of the MTP blocks."""
    return AttentionShape(
        config.swa_num_attention_heads, config.swa_num_key_value_heads, config.swa_head_dim, config.swa_v_head_dim
    )


def is_full(config: MiMoV2FlashConfig, prefix: str) -> bool:
    """Whether the attention at `prefix` is that of a full layer."""
    match = _ATTENTION.match(prefix)
    index = int(match["index"]) if match is not None and match["mtp"] is None else config.num_hidden_layers
    return index < config.num_hidden_layers and config.layer_types[index] == "full_attention"


def released_tp(config: MiMoV2FlashConfig) -> int:
    """The shards that the released files of this model were written in: the key-value heads of its full layers."""
    return config.num_key_value_heads
