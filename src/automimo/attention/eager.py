"""The reference: attention with a dense mask, written to be read. Memory is quadratic in the number of tokens.

T tokens, H query heads, K key/value heads, B batch, S rows of a batch entry, D width of q and k, V width of v.
"""

import torch
from torch import Tensor

from automimo.attention.layout import DenseLayout, DocumentLayout
from automimo.errors import ConfigError


def eager_attention(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKV: Tensor,
    sink_H: Tensor | None,
    *,
    layout: DocumentLayout | DenseLayout,
    window: int | None,
    scale: float,
) -> Tensor:
    """softmax(q k^T * scale + mask, with the sink as one more column) v -> [T, H, V].

    The sink column has the logit sink[h] (not scaled, never masked) and the value 0, so it only takes weight away. The
    softmax runs in fp32 (fp64 for fp64 inputs). A row that sees no key gives 0, with zero gradients.
    """
    batch = layout.batch if isinstance(layout, DenseLayout) else 1
    visible, bias = dense_mask(layout, window)
    group = q_THD.shape[1] // k_TKD.shape[1]
    q_BHSD = q_THD.unflatten(0, (batch, -1)).transpose(1, 2)
    k_BHSD = k_TKD.unflatten(0, (batch, -1)).transpose(1, 2).repeat_interleave(group, dim=1)
    v_BHSV = v_TKV.unflatten(0, (batch, -1)).transpose(1, 2).repeat_interleave(group, dim=1)

    p_BHSS = masked_softmax(q_BHSD @ k_BHSD.transpose(-1, -2), visible, bias, sink_H, scale)
    out_BHSV = p_BHSS.to(v_BHSV.dtype) @ v_BHSV
    return out_BHSV.transpose(1, 2).flatten(0, 1)


def masked_softmax(
    products: Tensor, visible: Tensor, bias: Tensor | None, sink_H: Tensor | None, scale: float
) -> Tensor:
    """Probabilities in fp32 (fp64) of the key columns, from q k^T [B, H, ..., keys], next to one sink column per head.

    `visible` and `bias` broadcast to `products`. A row without a visible key has probability 0 everywhere.
    """
    scores = _softmax_dtype(products) * scale
    if bias is not None:
        scores = scores + bias
    # A row without a visible key would be a softmax over -inf only, NaN in both directions: let it see everything, then
    # zero its probabilities.
    blind = ~visible.any(dim=-1, keepdim=True)
    scores = scores.masked_fill(~(visible | blind), float("-inf"))
    if sink_H is None:
        return scores.softmax(dim=-1).masked_fill(blind, 0.0)
    column = sink_H.to(scores.dtype).view(-1, *[1] * (scores.ndim - 2)).expand(*scores.shape[:-1], 1)
    p = torch.cat([scores, column], dim=-1).softmax(dim=-1)
    return p[..., :-1].masked_fill(blind, 0.0)


def dense_mask(layout: DocumentLayout | DenseLayout, window: int | None) -> tuple[Tensor, Tensor | None]:
    """(visible bool, additive fp32 bias or None), both broadcastable to [B, H, S, S]."""
    if isinstance(layout, DocumentLayout):
        document, row = layout.document_ids, torch.arange(layout.total, device=layout.document_ids.device)
        distance = row[:, None] - row
        visible = (document[:, None] == document) & (distance >= 0)
        if window is not None:
            visible &= distance < window
        return visible[None, None], None
    mask = layout.full_mask if window is None else layout.sliding_mask
    if mask is None:
        kind = "full_mask" if window is None else "sliding_mask"
        raise ConfigError(f"a layer with window {window} needs {kind}, and the DenseLayout has none")
    if mask.dtype == torch.bool:
        return mask, None
    visible = mask > torch.finfo(mask.dtype).min
    return visible, mask.float().masked_fill(~visible, 0.0)


def _softmax_dtype(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
