"""The `te` backend: packed attention by the fused kernels of Transformer Engine. Not yet run on a GPU.

Transformer Engine is imported when a layer attends for the first time (or learns with which ranks it shares its
streams), so a model with this backend is built, loaded, saved and converted where the package cannot even be imported.

T tokens of this rank, H query heads, K key/value heads, D width of q and k, V width of v.
"""

from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from automimo.attention.context import SharedLayout
from automimo.attention.dispatch import check_shapes
from automimo.attention.layout import DenseLayout, DocumentLayout
from automimo.distributed.context.te_batch import check_rule_of_te
from automimo.errors import ConfigError, TrainingError
from automimo.fp32 import KeepFp32

# With a sink and packed documents, older cuDNN has a right backward pass for these widths only.
SINK_WIDTHS = (64, 128, 256)
SINK_CUDNN = 92600


class TeAttention(KeepFp32):
    """`DotProductAttention` of Transformer Engine for one layer with these numbers; see `attend` for what it computes.

    It takes packed streams only, in which every padded batch arrives here, with `padding_causal` masks. `value_width`
    may be below `width`: values are padded with zeros, and the output is cropped.

    `softmax_offset` [H] is the sink, an fp32 buffer (None without a sink). Transformer Engine makes it a parameter, but
    keeps its address for the backward pass, where FSDP may have freed that memory: so it cannot be trained here.
    """

    softmax_offset: Tensor | None

    def __init__(
        self, *, heads: int, kv_heads: int, width: int, value_width: int, window: int | None, scale: float, sink: bool
    ) -> None:
        """Raises ConfigError for values that are wider than queries and keys."""
        super().__init__()
        if value_width > width:
            raise ConfigError(
                f"attention 'te' pads values to the width of queries and keys, but head_dim is {width} and v_head_dim "
                f"{value_width}: choose attention sdpa"
            )
        self.heads, self.kv_heads, self.width, self.value_width = heads, kv_heads, width, value_width
        # Ours counts the query itself, theirs the keys to its left.
        self.window = (-1, 0) if window is None else (window - 1, 0)
        self.scale = scale
        self.ranks = 1
        self._context: tuple[dist.ProcessGroup, torch.cuda.Stream | None] | None = None
        # In a list, and so no child: its parameter, its state of FP8 and casts of it are not to be seen from outside.
        self._core: list[Any] = []
        self.register_buffer("softmax_offset", torch.zeros(heads, dtype=torch.float32) if sink else None)

    def forward(
        self, q_THD: Tensor, k_TKD: Tensor, v_TKV: Tensor, layout: DocumentLayout | SharedLayout | DenseLayout
    ) -> Tensor:
        """-> [T, H, V]. Of a stream that ranks share, tensors are the tokens of this rank; all of them call it.

        Raises ConfigError for explicit masks, tensors that do not fit, and when Transformer Engine cannot be used,
        TrainingError for a cuDNN whose gradients are wrong.
        """
        if isinstance(layout, DenseLayout):
            raise ConfigError(
                "attention 'te' cannot take explicit masks (4-D, or 2-D with holes): use attention 'eager'"
            )
        # Under context parallelism Transformer Engine wants the boundaries of the whole stream, not those of a share.
        whole = layout.whole if isinstance(layout, SharedLayout) else layout
        check_shapes(q_THD, k_TKD, v_TKV, self.softmax_offset, whole.total // self.ranks)
        if self.softmax_offset is not None and self.training:
            check_sink_cudnn(self.width)
        copies = self._groups() // self.kv_heads
        if copies > 1:
            k_TKD, v_TKV = k_TKD.repeat_interleave(copies, 1), v_TKV.repeat_interleave(copies, 1)
        core = self._ready_core()
        out: Tensor = core(
            q_THD,
            k_TKD,
            F.pad(v_TKV, (0, self.width - self.value_width)),
            qkv_format="thd",
            attn_mask_type="padding_causal",
            cu_seqlens_q=whole.cu_seqlens,
            cu_seqlens_kv=whole.cu_seqlens,
            # FlashAttention under context parallelism wants these as well. That documents follow each other without a
            # gap would be found out by comparing on the device, in every layer.
            cu_seqlens_q_padded=whole.cu_seqlens,
            cu_seqlens_kv_padded=whole.cu_seqlens,
            pad_between_seqs=False,
            max_seqlen_q=whole.max_length,
            max_seqlen_kv=whole.max_length,
        )
        return out.reshape(q_THD.shape)[..., : self.value_width]

    def share(self, group: dist.ProcessGroup, stream: torch.cuda.Stream | None) -> None:
        """Share streams with the ranks of `group`, which exchange heads for tokens (all-to-all, the only exchange that
        Transformer Engine has for sinks) on `stream`, by default a new one.

        The heads must divide, see `ContextAttention`. Key/value heads that are fewer than the ranks are repeated, since
        Transformer Engine gives each rank at least one.
        """
        if stream is None and torch.cuda.is_available():
            stream = torch.cuda.Stream()
        if torch.cuda.is_available():
            check_rule_of_te(group.size(), group.rank(), torch.device("cuda", torch.cuda.current_device()))
        self.ranks, self._context = group.size(), (group, stream)
        self._core.clear()
        self._ready_core()

    def _groups(self) -> int:
        """Key/value heads that Transformer Engine gets."""
        return max(self.kv_heads, self.ranks)

    def _ready_core(self) -> Any:
        if not self._core:
            self._core.append(self._make_core())
        core = self._core[0]
        # It is no child, so these do not reach it by themselves; and a buffer is another tensor after a move.
        core.softmax_offset = self.softmax_offset
        if core.training != self.training:
            core.train(self.training)
        return core

    def _make_core(self) -> Any:
        engine = transformer_engine()
        sink = self.softmax_offset is not None
        try:
            core = engine.DotProductAttention(
                self.heads,
                self.width,
                num_gqa_groups=self._groups(),
                attention_dropout=0.0,
                qkv_format="thd",
                attn_mask_type="padding_causal",
                window_size=self.window,
                softmax_scale=self.scale,
                softmax_type="learnable" if sink else "vanilla",
            )
        except TypeError as error:
            raise ConfigError(f"attention 'te': the installed transformer_engine is too old ({error})") from error
        if sink:
            del core.softmax_offset  # the parameter, in whose place the buffer is lent
        if self._context is not None:
            group, stream = self._context
            core.set_context_parallel_group(group, dist.get_process_group_ranks(group), stream, cp_comm_type="a2a")
        return core


def transformer_engine() -> Any:
    """The module `transformer_engine.pytorch`. Raises ConfigError when it cannot be imported."""
    try:
        return import_module("transformer_engine.pytorch")
    except (ImportError, OSError) as error:  # a library it loads is missing: OSError
        raise ConfigError(f"attention 'te': transformer_engine.pytorch cannot be imported: {error}") from error


def check_sink_cudnn(width: int) -> None:
    """Raises TrainingError unless cuDNN has right gradients for packed attention with a sink and heads of `width`."""
    if width in SINK_WIDTHS:
        return
    found = torch.backends.cudnn.version()
    if found is None or found < SINK_CUDNN:
        text = "no cuDNN" if found is None else f"cuDNN {found // 10000}.{found // 100 % 100}.{found % 100}"
        raise TrainingError(
            f"attention 'te' cannot train packed documents with attention sinks in heads of width {width} on {text}, "
            "whose gradients are wrong (Transformer Engine issue 3249): install cuDNN 9.26 or newer, or choose "
            "attention sdpa"
        )
