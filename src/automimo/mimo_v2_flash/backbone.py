"""The decoder of MiMo-V2: blocks of attention and feed-forward over a packed stream.

Legend: T tokens of the stream, D hidden, R rotary width.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from automimo.attention import KVCache
from automimo.backend import BackendConfig
from automimo.errors import ConfigError
from automimo.mimo_v2_flash.attention import Layout, MiMoV2FlashAttention
from automimo.mimo_v2_flash.config import MiMoV2FlashConfig
from automimo.mimo_v2_flash.layers import MiMoV2FlashRotaryEmbedding, MiMoV2RMSNorm, SwiGLU
from automimo.mimo_v2_flash.masks import causal_mask_mapping
from automimo.mimo_v2_flash.stream import Stream, batch_stream, packed_stream
from automimo.moe import (
    Documents,
    MoE,
    MoEConfig,
    RouterStats,
    attach_aux_loss,
    router_frozen_contexts,
    selective_contexts,
)

ACTIVATION_CHECKPOINTING = ("none", "full", "selective")


def moe_config_from(config: MiMoV2FlashConfig, **overrides: Any) -> MoEConfig:
    """The router and expert settings a model config implies; `overrides` replace single fields."""
    score_func = "sigmoid_with_bias" if config.scoring_func == "sigmoid" else config.scoring_func
    values: dict[str, Any] = {
        "n_routed_experts": config.n_routed_experts,
        "n_shared_experts": config.n_shared_experts,
        "n_activated_experts": config.num_experts_per_tok,
        "n_expert_groups": config.n_group,
        "n_limited_groups": config.topk_group,
        "train_gate": True,
        "gate_bias_update_factor": 0.0,
        "aux_loss_coeff": 0.0,
        "score_func": score_func,
        "route_scale": config.routed_scaling_factor,
        "dim": config.hidden_size,
        "inter_dim": config.intermediate_size,
        "moe_inter_dim": config.moe_intermediate_size,
        "norm_topk_prob": config.norm_topk_prob,
        "apply_router_weight_after_down": config.apply_router_weight_after_down,
        "force_e_score_correction_bias": True,
        "dtype": str(config.dtype).removeprefix("torch."),
    }
    return MoEConfig.from_dict({**values, **overrides})


class MiMoV2FlashBlock(nn.Module):
    """x += attention(norm(x)); x += feed-forward(norm(x)), the latter an MoE or, in a dense layer, a SwiGLU."""

    def __init__(
        self,
        layer_idx: int,
        config: MiMoV2FlashConfig,
        moe_config: MoEConfig | None,
        backend: BackendConfig,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.attention_type = config.layer_types[layer_idx]
        is_swa = self.attention_type == "sliding_attention"
        fused = backend.rms_norm == "torch"
        self.self_attn = MiMoV2FlashAttention(config, backend, is_swa, layer_idx, dtype)
        self.mlp: MoE | SwiGLU
        if moe_config is not None and config.moe_layer_freq[layer_idx]:
            self.mlp = MoE(moe_config, backend.experts)
        else:
            self.mlp = SwiGLU(config.hidden_size, config.intermediate_size, dtype)
        self.input_layernorm = MiMoV2RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, fused=fused)
        self.post_attention_layernorm = MiMoV2RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, fused=fused)

    def forward(
        self,
        x_TD: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        layout: Layout | None,
        routed: Tensor | None,
        documents: Documents | None,
        cache: KVCache | None = None,
    ) -> tuple[Tensor, RouterStats | None]:
        """x_TD [T, D] -> x_TD and, for an MoE, what its router counted."""
        x_TD = x_TD + self.self_attn(self.input_layernorm(x_TD), position_embeddings, layout, cache)
        normed_TD = self.post_attention_layernorm(x_TD)
        if not isinstance(self.mlp, MoE):
            return x_TD + self.mlp(normed_TD), None
        y_TD, stats = self.mlp(
            normed_TD, token_indices=routed, documents=documents, context=self.self_attn.context_group
        )
        return x_TD + y_TD, stats

    @torch.no_grad()
    def init_weights(self, std: float) -> None:
        """Normal weights of standard deviation `std`, unit norms, zero sinks and biases."""
        self.self_attn.init_weights(std)
        self.input_layernorm.reset_parameters()
        self.post_attention_layernorm.reset_parameters()
        if isinstance(self.mlp, MoE):
            self.mlp.reset_parameters(std)
        else:
            for linear in (self.mlp.gate_proj, self.mlp.up_proj, self.mlp.down_proj):
                nn.init.normal_(linear.weight, std=std)


class MiMoV2FlashModel(nn.Module):
    """Embedding, blocks and final norm of a MiMo-V2 text model.

    `layers` is a ModuleDict with string keys, so that a pipeline stage keeps the original layer numbers. `moe_config`
    replaces the settings read from `config`, `moe_overrides` single fields of them.

    Raises ConfigError when both are passed.
    """

    def __init__(
        self,
        config: MiMoV2FlashConfig,
        backend: BackendConfig,
        *,
        moe_config: MoEConfig | None = None,
        moe_overrides: dict | None = None,
    ) -> None:
        super().__init__()
        if moe_config is not None and moe_overrides is not None:
            raise ConfigError("Cannot pass both moe_config and moe_overrides; put the overrides into moe_config")
        self.config = config
        self.backend = backend
        if moe_config is None and config.n_routed_experts is not None:
            moe_config = moe_config_from(config, **(moe_overrides or {}))
        self.moe_config = moe_config
        dtype = config.dtype
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        self.layers = nn.ModuleDict(
            {str(i): MiMoV2FlashBlock(i, config, moe_config, backend, dtype) for i in range(config.num_hidden_layers)}
        )
        self.norm = MiMoV2RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, fused=backend.rms_norm == "torch")
        self.rotary_emb = MiMoV2FlashRotaryEmbedding(config.rope_theta, config.head_dim, config.partial_rotary_factor)
        self.swa_rotary_emb = MiMoV2FlashRotaryEmbedding(
            config.swa_rope_theta, config.swa_head_dim, config.partial_rotary_factor
        )
        self.has_sliding_layers = "sliding_attention" in config.layer_types
        self.activation_checkpointing = "none"

    def set_activation_checkpointing(self, mode: str) -> None:
        """``none``; ``full``: every block is recomputed in the backward pass, the router's choice excepted; or
        ``selective``: results that are dear for their size are kept as well, see `moe.selective_contexts`."""
        if mode not in ACTIVATION_CHECKPOINTING:
            raise ConfigError(
                f"activation_checkpointing: {mode!r} is unknown; choose one of: {', '.join(ACTIVATION_CHECKPOINTING)}"
            )
        self.activation_checkpointing = mode

    def _build_causal_mask_mapping(
        self,
        inputs_embeds: Tensor,
        attention_mask: Tensor | dict[str, Tensor] | None,
        position_ids: Tensor,  # noqa: ARG002 - fixed signature; distances are row distances
        cache_position: Tensor,  # noqa: ARG002
    ) -> dict[str, Tensor]:
        """Dense masks per layer kind, [B or 1, heads or 1, S, S]; see `masks.causal_mask_mapping`."""
        window = self.config.sliding_window if self.has_sliding_layers else None
        shape = (inputs_embeds.shape[0], inputs_embeds.shape[1])
        return causal_mask_mapping(attention_mask, shape, window, inputs_embeds.device)

    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor] | None = None,
        padding_mask: Tensor | None = None,
        cache_position: Tensor | None = None,
        _packed_seq_ids: Tensor | None = None,
        seq_lens: Tensor | None = None,  # noqa: ARG002 - packed batches carry them; the boundaries are in cu_seqlens
        seq_lens_padded: Tensor | None = None,  # noqa: ARG002
        cu_seqlens: Tensor | None = None,
        cu_seqlens_padded: Tensor | None = None,
        max_seqlen: int | Tensor | None = None,
        qkv_format: str | None = None,
        cp_size: int = 1,
        cp_rank: int = 0,
        cache: KVCache | None = None,
        collect: list[Tensor] | None = None,
        **kwargs: Any,  # noqa: ARG002 - loaders add keys of their own
    ) -> Tensor:
        """Final hidden states: [B, S, D] for input [B, S], [T, D] for a packed stream.

        A packed stream is marked by ``qkv_format="thd"`` or by `cu_seqlens` [documents + 1] and given as [T] or [1, T].
        A 2-D `attention_mask` is 0 at padding and 1 or a document number elsewhere (`_packed_seq_ids` is the same
        thing under another name); outputs at padded places are unspecified. `padding_mask` is True at padding.
        `cache` is filled by a first call with the prompts and read by later calls with one token per sequence.
        `collect` receives the hidden states before every block and after the last norm.

        Where `setup_cp_attention` has joined the layers of `cp_size` ranks, the tokens are the share of rank `cp_rank`
        of a packed stream and `cu_seqlens` the boundaries of the whole one, as in a batch from `make_cp_batch_for_te`.

        Raises ValueError when the inputs contradict each other.
        """
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        if tokens is None:
            raise ValueError("pass input_ids or inputs_embeds; both are None")
        packed = qkv_format == "thd" or cu_seqlens is not None
        self._check_context(cp_size, cp_rank, packed, cache is not None)
        if isinstance(max_seqlen, Tensor) and max_seqlen.numel() != 1:
            raise ValueError(f"max_seqlen must be a scalar, got shape {list(max_seqlen.shape)}")
        if cache is not None and cache.batch > 0:
            return self._decode(tokens, cache)
        window = self.config.sliding_window if self.has_sliding_layers else None
        if cp_size > 1 and self.backend.attn == "te":
            window = None  # it has masks and an exchange of its own
        if packed:
            stream = packed_stream(
                tokens, position_ids, padding_mask, cu_seqlens, cu_seqlens_padded, window, cp_size, cp_rank
            )
        else:
            stream = self._batch_stream(
                tokens, position_ids, attention_mask, padding_mask, cache_position, _packed_seq_ids, window
            )
        x_TD = self._run(stream, cache, collect)
        return stream.unpack(x_TD)

    def _check_context(self, size: int, rank: int, packed: bool, cached: bool) -> None:
        """Raises ValueError unless the batch was cut for the ranks that share this model's streams."""
        ranks = next((block.self_attn.context_size for block in self.blocks()), 1)
        if size != ranks:
            hint = "cut the batch with a context-parallel sharder" if size == 1 else "call setup_cp_attention first"
            raise ValueError(f"cp_size is {size}, but {ranks} ranks share the streams of this model: {hint}")
        if not 0 <= rank < size:
            raise ValueError(f"cp_rank is {rank}, but there are {size} context-parallel ranks")
        if size > 1 and not packed:
            raise ValueError("context parallelism needs a packed (thd) stream with cu_seqlens")
        if size > 1 and cached:
            raise ValueError(f"a cache needs whole streams, but {size} ranks share those of this model")

    def _batch_stream(
        self,
        tokens: Tensor,
        position_ids: Tensor | None,
        attention_mask: Tensor | dict[str, Tensor] | None,
        padding_mask: Tensor | None,
        cache_position: Tensor | None,
        packed_seq_ids: Tensor | None,
        window: int | None,
    ) -> Stream:
        if tokens.dim() != 2 + int(tokens.is_floating_point()):
            raise ValueError(
                f"input must be [B, S] (embeddings [B, S, D]) or packed with cu_seqlens, got {tokens.shape}"
            )
        if packed_seq_ids is not None:
            if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:
                packed_seq_ids = packed_seq_ids * (attention_mask > 0)
            attention_mask = packed_seq_ids

        def dense_masks() -> dict[str, Tensor]:
            embeds = tokens if tokens.is_floating_point() else tokens.unsqueeze(-1)
            positions = position_ids if position_ids is not None else torch.arange(tokens.shape[1]).unsqueeze(0)
            cached = cache_position if cache_position is not None else positions[0]
            return self._build_causal_mask_mapping(embeds, attention_mask, positions, cached)

        return batch_stream(tokens, position_ids, attention_mask, padding_mask, window, dense_masks)

    def _run(self, stream: Stream, cache: KVCache | None, collect: list[Tensor] | None) -> Tensor:
        tokens = stream.tokens
        x_TD = tokens if tokens.is_floating_point() else self.embed_tokens(tokens)
        rotary = self._rotary(x_TD, stream.position_ids)
        recompute = self.activation_checkpointing != "none" and self.training and torch.is_grad_enabled()
        contexts = selective_contexts if self.activation_checkpointing == "selective" else router_frozen_contexts
        for block in self.blocks():
            if collect is not None:
                collect.append(stream.unpack(x_TD))
            inputs = (x_TD, rotary[block.attention_type], stream.layout, stream.routed, stream.documents, cache)
            if recompute:
                x_TD, stats = checkpoint(block, *inputs, use_reentrant=False, context_fn=contexts)
            else:
                x_TD, stats = block(*inputs)
            if stats is not None and self.training and isinstance(block.mlp, MoE):
                # Outside the recomputed region, so that nothing is counted twice.
                block.mlp.gate.record(stats)
                x_TD = attach_aux_loss(x_TD, stats.aux_loss, block.mlp.aux_loss_scale)
        if self.norm is not None:
            x_TD = self.norm(x_TD)
        if collect is not None:
            collect.append(stream.unpack(x_TD))
        return x_TD

    def blocks(self) -> list[MiMoV2FlashBlock]:
        """The blocks in their order."""
        return cast("list[MiMoV2FlashBlock]", list(self.layers.values()))

    def _rotary(self, x_TD: Tensor, position_ids: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """cos and sin per layer kind: the two kinds have different thetas, so one table for all layers is wrong."""
        return {
            "full_attention": self.rotary_emb(x_TD, position_ids),
            "sliding_attention": self.swa_rotary_emb(x_TD, position_ids),
        }

    def _decode(self, tokens: Tensor, cache: KVCache) -> Tensor:
        """One new token per cached sequence: ids [B] or [B, 1] -> hidden [B, 1, D]."""
        x_TD = tokens.flatten() if not tokens.is_floating_point() else tokens.flatten(0, -2)
        x_TD = x_TD if x_TD.is_floating_point() else self.embed_tokens(x_TD)
        rotary = self._rotary(x_TD, cache.lengths)
        for block in self.blocks():
            x_TD, _ = block(x_TD, rotary[block.attention_type], None, None, None, cache)
        return self.norm(x_TD).unsqueeze(1)

    @torch.no_grad()
    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        """Random weights: embeddings from a unit normal, projections and experts with `initializer_range`, unit norms.

        `buffer_device` is accepted for the callers that pass one; no buffer needs it.
        """
        del buffer_device
        nn.init.normal_(self.embed_tokens.weight)
        for block in self.blocks():
            block.init_weights(self.config.initializer_range)
        self.norm.reset_parameters()
