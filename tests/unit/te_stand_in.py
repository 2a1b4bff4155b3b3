"""`transformer_engine.pytorch.DotProductAttention` as its documentation describes it, in plain torch on the CPU.

It takes the documented arguments and no others, insists on what is documented for packed streams, and computes with our
dense reference; for several ranks, with our exchange around it. `install` puts it where imports find it, and `pair`
makes models that must compute the same with and without it.
"""

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from tiny_text import VOCAB, gradients, tiny_config, tiny_model
from torch import Tensor, nn

from automimo.attention.context import ContextAttention, share_layout
from automimo.attention.eager import eager_attention
from automimo.attention.layout import build_layout
from automimo.backend import BackendConfig
from automimo.mimo_v2_flash.model import MiMoV2FlashForCausalLM

BOUNDS = [0, 1, 12, 15, 40]
NEW_CUDNN = 92600


class DotProductAttention(nn.Module):
    """`calls` records the arguments of every forward pass, `context` those of `set_context_parallel_group`."""

    made: list["DotProductAttention"] = []  # noqa: RUF012 - replaced by `install`

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[..., Any] | None = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
    ) -> None:
        super().__init__()
        assert cp_group is cp_global_ranks is cp_stream is tp_group is get_rng_state_tracker is layer_number is None
        assert not sequence_parallel
        assert (tp_size, attention_type, attention_dropout, cp_comm_type) == (1, "self", 0.0, "p2p")
        assert isinstance(kv_channels, int)
        assert softmax_type in ("vanilla", "learnable")
        self.heads, self.width = num_attention_heads, kv_channels
        self.groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        assert num_attention_heads % self.groups == 0
        self.qkv_format, self.mask, self.window = qkv_format, attn_mask_type, window_size or (-1, 0)
        self.scale = kv_channels**-0.5 if softmax_scale is None else softmax_scale
        self.softmax_type = softmax_type
        self.softmax_offset = None
        if softmax_type == "learnable":
            # Made on the GPU whatever the default device is; here that is the CPU.
            parameter = nn.Parameter(torch.full((num_attention_heads,), 7.0, device="cpu"))
            del self.softmax_offset
            self.register_parameter("softmax_offset", parameter)
        self.calls: list[dict[str, Any]] = []
        self.context: tuple[Any, list[int], Any, str] | None = None
        self.fused_attention = nn.Identity()  # submodules have to learn of train() and eval() as well
        DotProductAttention.made.append(self)

    def get_extra_state(self) -> Tensor:
        """Like every module of Transformer Engine: an entry of the state dict that no checkpoint has."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError("no checkpoint has a state of FP8")

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: list[int], cp_stream: Any, cp_comm_type: str = "p2p"
    ) -> None:
        self.context = (cp_group, cp_global_ranks, cp_stream, cp_comm_type)

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: Tensor | None = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        pad_between_seqs: bool | None = None,
    ) -> Tensor:
        self.calls.append({name: value for name, value in locals().items() if name != "self"})
        assert attention_mask is None
        assert (qkv_format or self.qkv_format) == "thd"
        assert (attn_mask_type or self.mask) == "padding_causal", "packed streams want a padding mask"
        bounds = self._bounds(cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded, pad_between_seqs)
        longest = max(b - a for a, b in pairwise(bounds))
        for given in (max_seqlen_q, max_seqlen_kv):
            assert type(given) is int
            assert given >= longest
        ranks = 1 if self.context is None else self.context[0].size()
        tokens = bounds[-1] // ranks
        assert query_layer.shape == (tokens, self.heads, self.width)
        assert key_layer.shape == value_layer.shape == (tokens, self.groups, self.width)
        assert query_layer.dtype == key_layer.dtype == value_layer.dtype
        assert self.fused_attention.training == self.training
        left, right = window_size or self.window
        assert right == 0
        out = self._compute(query_layer, key_layer, value_layer, bounds, None if left == -1 else left + 1, ranks)
        return out.flatten(1)  # documented as [t, h * d]

    def _bounds(
        self,
        cu_q: Tensor | None,
        cu_kv: Tensor | None,
        padded_q: Tensor | None,
        padded_kv: Tensor | None,
        gaps: bool | None,
    ) -> list[int]:
        """Boundaries of the documents, which have no gaps in between here."""
        assert cu_q is not None
        assert cu_kv is not None
        assert cu_q.dtype == cu_kv.dtype == torch.int32
        assert cu_q.ndim == 1
        assert torch.equal(cu_q, cu_kv)
        for padded in (padded_q, padded_kv):
            assert padded is not None or self.context is None, "FlashAttention under context parallelism asks for it"
            assert padded is None or torch.equal(padded, cu_q)
        assert not gaps
        return cu_q.tolist()

    def _compute(self, q: Tensor, k: Tensor, v: Tensor, bounds: list[int], window: int | None, ranks: int) -> Tensor:
        sink = None
        if self.softmax_type == "learnable":
            sink = self.softmax_offset
            assert sink.shape == (self.heads,)
            assert sink.device == q.device
            sink = sink.float()
        if ranks == 1:
            layout = build_layout(bounds, window=window)
            return eager_attention(q, k, v, sink, layout=layout, window=window, scale=self.scale)
        assert self.context is not None
        group, _, _, exchange = self.context
        assert exchange == "a2a" or (sink is None and window is None), "a sink or a window is exact with a2a only"
        assert self.heads % ranks == self.groups % ranks == 0
        shared = share_layout(bounds, window=window, size=ranks, rank=group.rank(), device="cpu")
        exchange_heads = ContextAttention(group, self.heads, self.groups)
        return exchange_heads.attend(
            q, k, v, layout=shared, window=window, sink=sink, scale=self.scale, backend="eager"
        )


def install(monkeypatch: pytest.MonkeyPatch) -> list[DotProductAttention]:
    """Make `import transformer_engine.pytorch` find the stand-in, next to a new cuDNN; returns the list that all new
    ones enter."""
    made: list[DotProductAttention] = []
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: NEW_CUDNN)
    monkeypatch.setattr(DotProductAttention, "made", made)
    package, pytorch = ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch")
    for module in (package, pytorch):
        module.__spec__ = ModuleSpec(module.__name__, loader=None, is_package=True)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    pytorch.DotProductAttention = DotProductAttention  # type: ignore[attr-defined]
    return made


def with_te(model: MiMoV2FlashForCausalLM) -> MiMoV2FlashForCausalLM:
    """The same weights behind the other backend, through the names of a checkpoint."""
    ours = MiMoV2FlashForCausalLM(model.config, backend=BackendConfig(attn="te"))
    state = model.state_dict_adapter.to_hf(model.state_dict())
    ours.load_state_dict(ours.state_dict_adapter.from_hf(state))
    return ours.train(model.training)


def pair(**changes: Any) -> tuple[MiMoV2FlashForCausalLM, MiMoV2FlashForCausalLM]:
    """A model with `sdpa`, sinks in both kinds of layers frozen as they are with `te`, and the same with `te`."""
    reference = tiny_model(tiny_config(**changes))
    for name, parameter in reference.named_parameters():
        parameter.requires_grad_(not name.endswith("attention_sink_bias"))
    return reference, with_te(reference)


def run(model: MiMoV2FlashForCausalLM, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and the gradients of a loss to which every logit contributes."""
    logits = model(**inputs).logits
    (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
    return logits.detach(), gradients(model)


def packed(bounds: list[int]) -> dict[str, Any]:
    ids = torch.randint(0, VOCAB, (1, bounds[-1]), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "cu_seqlens": torch.tensor(bounds), "qkv_format": "thd"}
