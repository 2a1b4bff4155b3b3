"""Dense attention masks, for the inputs that only a dense mask can state: 4-D masks and 2-D masks with holes.

Everything here is B x S x S and therefore only used by the `eager` backend. True means visible. Distances are counted
in row positions, as transformers counts them.
"""

from __future__ import annotations

import torch
from torch import Tensor


def causal_mask_mapping(
    attention_mask: Tensor | dict[str, Tensor] | None, shape: tuple[int, int], window: int | None, device: torch.device
) -> dict[str, Tensor]:
    """Masks per layer kind from any accepted form of `attention_mask`.

    A dictionary passes through (``sliding_window_attention`` is an alias of ``sliding_attention``, None as a value
    means plain causal). A 4-D mask (bool True = visible, or floating, added to the scores) is a document mask: full
    layers use it as it is, sliding layers its part inside the causal window. A 2-D mask [B, S] hides the keys that are
    0 and, where its numbers are document numbers, keeps documents apart. `window` None leaves out the sliding entry.

    Raises ValueError for other ranks, unknown keys or a shape that does not fit (B, S).
    """
    if isinstance(attention_mask, dict):
        return _from_dict(attention_mask, shape, window, device)
    batch, length = shape
    visible = _causal(length, None, device).view(1, 1, length, length)
    if attention_mask is None:
        full: Tensor = visible
    elif attention_mask.dim() == 2:
        check_mask_shape(attention_mask, shape)
        ids = attention_mask.to(device=device, dtype=torch.int64)
        full = visible & (ids > 0)[:, None, None, :]
        if int(ids.max()) > 1:
            full = full & (ids[:, None, :, None] == ids[:, None, None, :])
    elif attention_mask.dim() == 4:
        if attention_mask.shape[0] not in (1, batch) or attention_mask.shape[2:] != (length, length):
            raise ValueError(
                f"attention_mask has shape {tuple(attention_mask.shape)}, expected [{batch} or 1, heads or 1, "
                f"{length}, {length}]"
            )
        if attention_mask.dtype != torch.bool and not attention_mask.is_floating_point():
            raise ValueError(
                f"a 4-D attention_mask is bool (True = visible) or floating (added to the scores), got "
                f"{attention_mask.dtype}"
            )
        full = attention_mask.to(device)
    else:
        raise ValueError(f"attention_mask must be 2-D or 4-D, got {attention_mask.dim()}-D")
    masks = {"full_attention": full}
    if window is not None:
        masks["sliding_attention"] = _restrict(full, _causal(length, window, device))
    return masks


def visible_tokens(mask: Tensor, batch: int) -> Tensor:
    """Which tokens are real [B, S] bool, read from the mask's diagonal: a padded token does not see itself."""
    diagonal = mask.diagonal(dim1=-2, dim2=-1)[:, 0]
    real = diagonal if mask.dtype == torch.bool else diagonal == 0
    return real.expand(batch, -1)


def check_mask_shape(mask: Tensor, shape: tuple[int, int]) -> None:
    """Raise ValueError unless a 2-D mask fits the input [B, S]."""
    if tuple(mask.shape) != shape:
        raise ValueError(f"attention_mask has shape {tuple(mask.shape)} but the input is {list(shape)}")


def _from_dict(
    masks: dict[str, Tensor], shape: tuple[int, int], window: int | None, device: torch.device
) -> dict[str, Tensor]:
    named = {("sliding_attention" if key == "sliding_window_attention" else key): value for key, value in masks.items()}
    unknown = sorted(set(named) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ValueError(f"attention_mask: unknown entry {unknown[0]!r}; known are full_attention, sliding_attention")
    default = causal_mask_mapping(None, shape, window, device)
    absent = sorted(set(default) - set(named))
    if absent:
        # Plain causal in its place would let documents see each other in half of the layers.
        raise ValueError(f"attention_mask: the dictionary has no {absent[0]!r} and the model has such layers")
    return {key: default[key] if named[key] is None else named[key].to(device) for key in default}


def _causal(length: int, window: int | None, device: torch.device) -> Tensor:
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)[None, :]
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)


def _restrict(mask: Tensor, visible: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return mask & visible
    return mask.masked_fill(~visible, float("-inf"))
