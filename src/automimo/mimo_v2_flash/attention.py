"""MiMoV2FlashAttention: projections, partial rotary embedding, value scale and sink around `attend`.

Legend: T tokens of the packed stream, D hidden, h query heads, hk key-value heads, d query/key width, dv value width.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from automimo.attention import ContextAttention, DenseLayout, DocumentLayout, KVCache, SharedLayout, attend
from automimo.attention.te import TeAttention
from automimo.backend import BackendConfig
from automimo.errors import ConfigError
from automimo.fp32 import KeepFp32
from automimo.mimo_v2_flash.config import MiMoV2FlashConfig
from automimo.mimo_v2_flash.layers import rotate

Layout = DocumentLayout | SharedLayout | DenseLayout


class MiMoV2FlashAttention(KeepFp32):
    """Attention of one layer: full when `is_swa` is False, otherwise over a sliding window.

    `attention_sink_bias` [h] is an extra softmax column with value 0. It is an fp32 parameter that is frozen until a
    recipe trains it, and None where the config gives this kind of layer no sink. Being a `KeepFp32`, the module keeps
    it in fp32 through every cast.

    With the backend `te` the sink is the buffer `attn_module.softmax_offset` instead and cannot be trained. Passes with
    a cache run on `sdpa` then: Transformer Engine gets packed documents, not single tokens.
    """

    attention_sink_bias: nn.Parameter | None
    attn_module: TeAttention | None

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
        self.context: ContextAttention | None = None
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
        self.attn_module = None
        if self.backend == "te":
            sink = None
            self.attn_module = TeAttention(
                heads=self.num_heads, kv_heads=self.num_kv_heads, width=self.head_dim, value_width=self.v_head_dim,
                window=self.window, scale=self.scale, sink=has_sink,
            )  # fmt: skip
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
        window, sink, scale = self.window, self.sink, self.scale
        if cache is not None:
            out_Thd = cache.attend(
                self.layer_idx, q_Thd, k_Thd, v_Thd, layout=layout if isinstance(layout, DocumentLayout) else None,
                window=window, sink=sink, scale=scale, backend="sdpa" if self.backend == "te" else self.backend,
            )  # fmt: skip
        elif layout is None:
            raise ConfigError("attention needs a layout unless it decodes from a cache")
        elif isinstance(layout, SharedLayout) and (self.context is None or self.context.size != layout.size):
            raise ConfigError(f"{layout.size} ranks share the stream, but not this layer: call setup_cp_attention")
        elif self.attn_module is not None:
            out_Thd = self.attn_module(q_Thd, k_Thd, v_Thd, layout)
        elif isinstance(layout, SharedLayout):
            assert self.context is not None
            out_Thd = self.context.attend(
                q_Thd, k_Thd, v_Thd, layout=layout, window=window, sink=sink, scale=scale, backend=self.backend
            )
        else:
            # A dense mask (4-D, or with holes) is only defined on the reference backend.
            backend = "eager" if isinstance(layout, DenseLayout) else self.backend
            out_Thd = attend(
                q_Thd, k_Thd, v_Thd, layout=layout, window=window, sink=sink, scale=scale, backend=backend
            )  # fmt: skip
        return self.o_proj(out_Thd.flatten(-2))

    @property
    def sink(self) -> Tensor | None:
        """The layer's sinks, fp32 [h], wherever its backend keeps them."""
        return self.attention_sink_bias if self.attn_module is None else self.attn_module.softmax_offset

    @property
    def context_group(self) -> dist.ProcessGroup | None:
        """The ranks that have tokens of the same documents; None where every document is whole."""
        return None if self.context is None else self.context.group

    @property
    def context_size(self) -> int:
        """How many ranks share every stream."""
        return 1 if self.context is None else self.context.size

    def setup_cp_attention(self, cp_mesh: DeviceMesh, cp_stream: torch.cuda.Stream | None = None) -> None:
        """Share every stream with the ranks of `cp_mesh` (one dimension); does nothing for a single rank.

        `cp_stream` is what the backend `te` communicates on (None: one of this layer's own); the others need none.
        Raises ConfigError for heads that do not divide.
        """
        if cp_mesh.size() > 1:
            self.context = ContextAttention(cp_mesh.get_group(), self.num_heads, self.num_kv_heads)
            if self.attn_module is not None:
                self.attn_module.share(self.context.group, cp_stream)

    @torch.no_grad()
    def init_weights(self, std: float) -> None:
        """Normal projections, zero biases, zero sink. The sink's `requires_grad` is left to the recipe."""
        for module in (self.q_proj, self.k_proj, self.v_proj, self.o_proj):
            nn.init.normal_(module.weight, std=std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        if self.sink is not None:
            nn.init.zeros_(self.sink)
