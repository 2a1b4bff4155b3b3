"""MiMoV2FlashAttention: projections, partial rotary embedding, value scale and sink around `attend`.

Legend: T tokens of the packed stream, D hidden, h query heads, hk key-value heads, d query/key width, dv value width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from automimo.attention import DenseLayout, DocumentLayout, KVCache, attend
from automimo.backend import BackendConfig
from automimo.errors import ConfigError
from automimo.fp32 import KeepFp32
from automimo.mimo_v2_flash.config import MiMoV2FlashConfig
from automimo.mimo_v2_flash.layers import rotate

Layout = DocumentLayout | DenseLayout


class MiMoV2FlashAttention(KeepFp32):
    """Attention of one layer: full when `is_swa` is False, otherwise over a sliding window.

    `attention_sink_bias` [h] is an extra softmax column with value 0. It is an fp32 parameter that is frozen until a
    recipe trains it, and None where the config gives this kind of layer no sink. Being a `KeepFp32`, the module keeps
    it in fp32 through every cast.
    """

    attention_sink_bias: nn.Parameter | None

    def __init__(
        self,
        config: MiMoV2FlashConfig,
        backend: BackendConfig,
        is_swa: bool,
        layer_idx: int,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.backend = backend.attn
        self.window = config.sliding_window if is_swa else None
        self.num_heads = config.swa_num_attention_heads if is_swa else config.num_attention_heads
        self.num_kv_heads = config.swa_num_key_value_heads if is_swa else config.num_key_value_heads
        self.head_dim = config.swa_head_dim if is_swa else config.head_dim
        self.v_head_dim = config.swa_v_head_dim if is_swa else config.v_head_dim
        self.value_scale = config.attention_value_scale
        # The scale follows the query width (192), neither the value width nor any padded one.
        self.scale = self.head_dim**-0.5

        def linear(inputs: int, outputs: int, bias: bool) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=bias, dtype=dtype)

        bias, hidden = config.attention_bias, config.hidden_size
        self.q_proj = linear(hidden, self.num_heads * self.head_dim, bias)
        self.k_proj = linear(hidden, self.num_kv_heads * self.head_dim, bias)
        self.v_proj = linear(hidden, self.num_kv_heads * self.v_head_dim, bias)
        self.o_proj = linear(self.num_heads * self.v_head_dim, hidden, False)
        has_sink = config.add_swa_attention_sink_bias if is_swa else config.add_full_attention_sink_bias
        sink = nn.Parameter(torch.zeros(self.num_heads, dtype=torch.float32), requires_grad=False) if has_sink else None
        self.register_parameter("attention_sink_bias", sink)

    def forward(
        self,
        x_TD: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        layout: Layout | None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """x_TD [T, D] -> [T, D]. `position_embeddings` are cos and sin [T, R] of this layer's kind.

        `layout` states what each token may see (None only in a decoding step, where `cache` knows).
        """
        cos, sin = position_embeddings
        q_Thd = rotate(self.q_proj(x_TD).unflatten(-1, (self.num_heads, self.head_dim)), cos, sin)
        k_Thd = rotate(self.k_proj(x_TD).unflatten(-1, (self.num_kv_heads, self.head_dim)), cos, sin)
        v_Thd = self.v_proj(x_TD).unflatten(-1, (self.num_kv_heads, self.v_head_dim))
        if self.value_scale is not None:
            v_Thd = v_Thd * self.value_scale
        window, sink, scale = self.window, self.attention_sink_bias, self.scale
        if cache is not None:
            out_Thd = cache.attend(
                self.layer_idx, q_Thd, k_Thd, v_Thd, layout=layout if isinstance(layout, DocumentLayout) else None,
                window=window, sink=sink, scale=scale, backend=self.backend,
            )  # fmt: skip
        elif layout is None:
            raise ConfigError("attention needs a layout unless it decodes from a cache")
        else:
            # A dense mask (4-D, or with holes) is only defined on the reference backend.
            backend = "eager" if isinstance(layout, DenseLayout) else self.backend
            out_Thd = attend(
                q_Thd, k_Thd, v_Thd, layout=layout, window=window, sink=sink, scale=scale, backend=backend
            )  # fmt: skip
        return self.o_proj(out_Thd.flatten(-2))

    @torch.no_grad()
    def init_weights(self, std: float) -> None:
        """Normal projections, zero biases, zero sink. The sink's `requires_grad` is left to the recipe."""
        for module in (self.q_proj, self.k_proj, self.v_proj, self.o_proj):
            nn.init.normal_(module.weight, std=std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        if self.attention_sink_bias is not None:
            nn.init.zeros_(self.attention_sink_bias)
