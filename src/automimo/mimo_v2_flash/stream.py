"""From every accepted input form to one packed stream and back.

Inside the model a batch is a stream of T tokens with document boundaries. A padded [B, S] batch is a stream of B
documents without its padding; a packed batch is a stream already. What depends on the boundaries is computed here, once
per batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from automimo.attention import DenseLayout, DocumentLayout, SharedLayout, build_layout, share_layout
from automimo.mimo_v2_flash.masks import check_mask_shape, visible_tokens
from automimo.moe import Documents


@dataclass(frozen=True)
class Stream:
    """A batch as the layers see it.

    `tokens` are input ids [T] int64 or embeddings [T, D]; `position_ids` [T]; `layout` states what each token sees;
    `routed` [N] int64 are the rows that are real tokens (None: all of them); `documents` says which document each
    token is of. `rows` [T] are the places of the stream in the flattened [B * S] input (None: all, in order), `shape`
    is (B, S), or None for a packed input. Of a stream that several ranks share, T are the tokens of this rank, and the
    layout and the numbers of the documents are those of the whole.
    """

    tokens: Tensor
    position_ids: Tensor
    layout: DocumentLayout | SharedLayout | DenseLayout
    routed: Tensor | None
    documents: Documents
    rows: Tensor | None
    shape: tuple[int, int] | None

    def unpack(self, x_TD: Tensor) -> Tensor:
        """Back to the form of the input: [T, D] for a packed one, else [B, S, D] with zeros at padded places."""
        if self.shape is None:
            return x_TD
        batch, length = self.shape
        if self.rows is not None:
            x_TD = x_TD.new_zeros(batch * length, x_TD.shape[-1]).index_copy(0, self.rows, x_TD)
        return x_TD.view(batch, length, -1)


def packed_stream(
    tokens: Tensor,
    position_ids: Tensor | None,
    padding_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_padded: Tensor | None,
    window: int | None,
    size: int = 1,
    rank: int = 0,
) -> Stream:
    """A stream from packed input: ids [T] or [1, T], or embeddings [T, D] or [1, T, D].

    `cu_seqlens_padded`, where given, replaces `cu_seqlens`: attention follows the physical boundaries. Negative
    sentinels are dropped. Padding inside documents (`padding_mask`, True = padding) stays in the stream, behind its
    document's tokens, and is neither routed nor counted.

    With `size` ranks that share the stream, tokens, positions and padding are those of `rank`, and the boundaries those
    of the whole stream.

    Raises ValueError for more than one row, missing or several boundary rows, and where the numbers do not fit.
    """
    floating = tokens.is_floating_point()
    dims = tokens.dim() - int(floating)
    if dims not in (1, 2):
        raise ValueError(f"packed (thd) input must be [T] or [1, T] (plus the hidden axis), got {list(tokens.shape)}")
    if dims == 2:
        if tokens.shape[0] != 1:
            raise ValueError(f"packed (thd) input must have batch size 1, got {tokens.shape[0]}")
        tokens = tokens.squeeze(0)
    boundaries = cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded
    if boundaries is None:
        raise ValueError("packed (thd) input needs cu_seqlens, as in a batch from make_cp_batch_for_te")
    for name, given in (("cu_seqlens", cu_seqlens), ("cu_seqlens_padded", cu_seqlens_padded)):
        if given is not None and given.dim() == 2 and given.shape[0] != 1:
            raise ValueError(f"{name} must be one row, got {given.shape[0]} rows")
    if boundaries.dim() == 2:
        boundaries = boundaries.squeeze(0)
    boundaries = boundaries[boundaries >= 0].to(torch.int32)
    _check_size("position_ids", position_ids, tokens.shape[0])
    _check_size("padding_mask", padding_mask, tokens.shape[0])
    routed = None if padding_mask is None else _indices(~padding_mask.reshape(-1).bool())
    layout: DocumentLayout | SharedLayout
    if size == 1:
        whole = layout = build_layout(boundaries, window=window, device=tokens.device)
        positions, documents = whole.position_ids, _documents_of(whole)
    else:
        layout = share_layout(boundaries.tolist(), window=window, size=size, rank=rank, device=tokens.device)
        whole, places = layout.whole, layout.places
        positions = whole.position_ids.index_select(0, places)
        documents = Documents(whole.document_ids.index_select(0, places), len(whole.lengths))
    if whole.total != tokens.shape[0] * size:
        shared = "" if size == 1 else f" on each of {size} ranks"
        raise ValueError(f"cu_seqlens end at {whole.total} but the stream has {tokens.shape[0]} tokens{shared}")
    if position_ids is not None:
        positions = position_ids.reshape(-1)
    return Stream(tokens, positions, layout, routed, documents, rows=None, shape=None)


def _documents_of(layout: DocumentLayout) -> Documents:
    return Documents(layout.document_ids, len(layout.lengths))


def batch_stream(
    tokens: Tensor,
    position_ids: Tensor | None,
    attention_mask: Tensor | dict[str, Tensor] | None,
    padding_mask: Tensor | None,
    window: int | None,
    dense_masks: Callable[[], dict[str, Tensor]],
) -> Stream:
    """A stream from ids [B, S] or embeddings [B, S, D].

    A 2-D mask is 0 at padding and 1 (or a document number) elsewhere; padding may be left or right. Padded tokens leave
    the stream. A mask with holes, a 4-D mask or a dictionary runs on dense masks, which `dense_masks` makes.
    """
    batch, length = tokens.shape[:2]
    device = tokens.device
    positions = torch.arange(length, device=device).expand(batch, -1) if position_ids is None else position_ids
    if positions.dim() > 2 or positions.shape[-1] != length or positions.numel() not in (length, batch * length):
        raise ValueError(f"position_ids has shape {list(positions.shape)} but the input is {[batch, length]}")
    positions = positions.expand(batch, length).reshape(-1)
    _check_size("padding_mask", padding_mask, batch * length)
    tokens = tokens.flatten(0, 1)
    shape = (batch, length)
    mask = attention_mask if isinstance(attention_mask, Tensor) else None
    if attention_mask is None and padding_mask is not None:
        mask, padding_mask = ~padding_mask.bool(), None
    if attention_mask is None and mask is None:
        layout = build_layout(torch.arange(batch + 1, dtype=torch.int32) * length, window=window, device=device)
        return Stream(tokens, positions, layout, None, _documents_of(layout), rows=None, shape=shape)

    boundaries = None
    if mask is not None and mask.dim() == 2:
        check_mask_shape(mask, shape)
        rows, boundaries = _documents(mask.to(device=device, dtype=torch.int64))
    if boundaries is None:
        return _dense_stream(tokens, positions, mask, padding_mask, shape, dense_masks())
    layout = build_layout(boundaries, window=window, device=device)
    routed = None
    if padding_mask is not None:
        real = ~padding_mask.to(device).reshape(-1).bool()
        routed = _indices(real if rows is None else real.index_select(0, rows))
    if rows is not None:
        tokens, positions = tokens.index_select(0, rows), positions.index_select(0, rows)
    return Stream(tokens, positions, layout, routed, _documents_of(layout), rows=rows, shape=shape)


def _dense_stream(
    tokens: Tensor,
    positions: Tensor,
    mask: Tensor | None,
    padding_mask: Tensor | None,
    shape: tuple[int, int],
    masks: dict[str, Tensor],
) -> Stream:
    batch, length = shape
    layout = DenseLayout(batch, length, masks["full_attention"], masks.get("sliding_attention"))
    if padding_mask is not None:
        real = ~padding_mask.bool()
    elif mask is not None and mask.dim() == 2:
        real = mask > 0
    else:
        real = visible_tokens(masks["full_attention"], batch)
    documents = Documents(torch.arange(batch, device=tokens.device).repeat_interleave(length), batch)
    return Stream(tokens, positions, layout, _indices(real.reshape(-1)), documents, rows=None, shape=shape)


def _documents(mask_BS: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Rows of the real tokens in the flattened batch (None: all) and document boundaries (None: the mask has holes)."""
    batch, length = mask_BS.shape
    previous = torch.nn.functional.pad(mask_BS[:, :-1], (1, 0))
    real = (mask_BS > 0).flatten()
    starts = ((mask_BS > 0) & (mask_BS != previous)).flatten()
    row_ids = torch.arange(batch, device=mask_BS.device).repeat_interleave(length) * (mask_BS.max() + 1)
    documents = (row_ids + mask_BS.flatten())[real].unique().numel()
    if int(starts.sum()) != documents:
        return None, None
    rows = real.nonzero().squeeze(-1)
    first = starts.index_select(0, rows).nonzero().squeeze(-1)
    boundaries = torch.cat((first, first.new_tensor([rows.numel()]))).to(torch.int32)
    return (None if rows.numel() == real.numel() else rows), boundaries


def _check_size(name: str, given: Tensor | None, tokens: int) -> None:
    """Neither may be broadcast: a short padding mask would silently leave the rest of the stream unrouted."""
    if given is not None and given.numel() != tokens:
        raise ValueError(f"{name} has shape {list(given.shape)} but the input has {tokens} tokens")


def _indices(real_T: Tensor) -> Tensor | None:
    """Rows that are True, or None when all are."""
    rows = real_T.nonzero().squeeze(-1)
    return None if rows.numel() == real_T.numel() else rows
