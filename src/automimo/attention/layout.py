"""Which rows of a token stream may attend to which: documents, and the tiles that cover their visible pairs.

Everything here depends on the document boundaries alone. It is computed once per batch, shared by all layers, and holds
memory linear in the number of tokens.

Vocabulary. A *tile* is a few consecutive query rows of the stream against consecutive key rows that end with them: rows
[a, a + rows) against keys [a - reach, a + rows). A query sees a contiguous range of keys that ends with itself, so
tiles cover every visible pair; a bias of -inf takes the other pairs of a tile out. Short documents and small windows
share tiles of one size, which a backend computes in batches. A long document is cut by the backend, which knows the
number of heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import torch
from torch import Tensor

from automimo.errors import ConfigError

# Documents up to this length share tiles with their neighbours.
SHORT_DOCUMENT = 128
# Windows up to this size use tiles that ignore document boundaries; their bias takes 4 * (rows + window) bytes per
# token.
SMALL_WINDOW = 256
SHARED_ROWS = 32
# Largest number of query rows in a tile of a long document.
MAX_ROWS = 256


@dataclass(frozen=True)
class TileRun:
    """`count` tiles side by side, whatever documents they belong to.

    Tile t has the query rows [first_row + t * rows, + rows) and their keys from `reach` rows earlier on; `reach` is a
    multiple of `rows` where count > 1. `bias` fp32 [count, rows, reach + rows] is 0 or, where the key is not visible,
    -inf.
    """

    first_row: int
    rows: int
    reach: int
    count: int
    bias: Tensor


@dataclass(frozen=True)
class LongDocument:
    """The rows [start, stop) are one document whose queries see `window` keys (its length: all that came before).

    `triangle` fp32 [MAX_ROWS, MAX_ROWS] is 0 and, above the diagonal, -inf: every bias of such a document is a slice
    of it.
    """

    start: int
    stop: int
    window: int
    triangle: Tensor


Tiles = tuple[TileRun | LongDocument, ...]


@dataclass(frozen=True)
class DocumentLayout:
    """A packed stream of `total` tokens: attention is causal and never crosses a document.

    Made by `build_layout`. `cu_seqlens` int32 [D + 1], `position_ids` int64 [T] (row within its document) and
    `document_ids` int64 [T] are on the device of the stream, the rest is on the host. `full_tiles` serve layers
    without a window, `sliding_tiles` those with `window`.
    """

    cu_seqlens: Tensor
    lengths: tuple[int, ...]
    total: int
    max_length: int
    position_ids: Tensor
    document_ids: Tensor
    window: int | None
    full_tiles: Tiles
    sliding_tiles: Tiles | None

    def tiles(self, window: int | None) -> Tiles:
        """The tiles of a layer with this window (None: full causal).

        Raises:
            ConfigError: the layout was built for another window.
        """
        if window is None or window >= self.max_length:
            return self.full_tiles
        if window != self.window or self.sliding_tiles is None:
            raise ConfigError(
                f"window {window} was asked of a layout that was built for window {self.window}: "
                "pass the layer's window to build_layout"
            )
        return self.sliding_tiles


@dataclass(frozen=True)
class DenseLayout:
    """A [batch, length] grid with explicit masks, row-major in the stream (T = batch * length); `eager` only.

    `full_mask` serves layers without a window, `sliding_mask` those with one; None where the model has no such layer.
    Each broadcasts to [batch, heads, length, length] and is either bool (True: visible) or floating (added to the
    scores in fp32; the minimum of its dtype and -inf mean invisible). The masks are taken as they are: causality and
    window are theirs.

    Raises:
        ConfigError: a mask has another shape or an integer dtype.
    """

    batch: int
    length: int
    full_mask: Tensor | None
    sliding_mask: Tensor | None

    def __post_init__(self) -> None:
        for name, mask in (("full_mask", self.full_mask), ("sliding_mask", self.sliding_mask)):
            if mask is None:
                continue
            if mask.dtype != torch.bool and not mask.is_floating_point():
                raise ConfigError(
                    f"{name} has dtype {mask.dtype}: pass bool (True = visible) or floating (added to scores)"
                )
            grid = (self.batch, -1, self.length, self.length)
            fits = mask.ndim == 4 and all(
                size in (1, want) or want == -1 for size, want in zip(mask.shape, grid, strict=True)
            )
            if not fits:
                raise ConfigError(
                    f"{name} has shape {tuple(mask.shape)}, which does not broadcast to "
                    f"[{self.batch}, heads, {self.length}, {self.length}]"
                )

    @property
    def total(self) -> int:
        """Tokens in the stream, padding included."""
        return self.batch * self.length


def build_layout(
    cu_seqlens: Tensor | Sequence[int], *, window: int | None, device: torch.device | str | None = None
) -> DocumentLayout:
    """The layout of documents that end at the cumulative token counts `cu_seqlens` [D + 1] (first entry 0).

    `window` is the number of keys a query of the sliding layers sees, itself included (None: no sliding layers).
    Documents of zero length are allowed. `device` defaults to that of `cu_seqlens`.

    Raises:
        ConfigError: boundaries that are not 1-D integers, do not start at 0 or decrease; a window below 1.
    """
    if device is None:
        device = cu_seqlens.device if isinstance(cu_seqlens, Tensor) else "cpu"
    bounds = _checked_bounds(cu_seqlens)
    if window is not None and window < 1:
        raise ConfigError(f"window is {window}; a query sees at least itself, so it must be 1 or more")
    lengths = tuple(b - a for a, b in pairwise(bounds))
    total, max_length = bounds[-1], max(lengths, default=0)
    lengths_D = torch.tensor(lengths, dtype=torch.int64, device=device)
    starts_D = torch.tensor(bounds[:-1], dtype=torch.int64, device=device)
    document_ids = torch.repeat_interleave(lengths_D, output_size=total)
    document_starts = starts_D[document_ids]
    rows = torch.arange(total, device=device)
    above = torch.ones(MAX_ROWS, MAX_ROWS, dtype=torch.bool, device=device).triu_(1)
    triangle = _bias(above)
    full_tiles = _full_tiles(bounds, document_starts, triangle)
    sliding_tiles = None
    if window is not None and window >= max_length:
        sliding_tiles = full_tiles
    elif window is not None and window <= SMALL_WINDOW:
        first_keys = torch.maximum(document_starts, rows - (window - 1))
        sliding_tiles = tuple(_shared_tiles(0, total, window, first_keys))
    elif window is not None:
        sliding_tiles = tuple(LongDocument(a, b, window, triangle) for a, b in pairwise(bounds) if b > a)
    return DocumentLayout(
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32, device=device),
        lengths=lengths,
        total=total,
        max_length=max_length,
        position_ids=rows - document_starts,
        document_ids=document_ids,
        window=window,
        full_tiles=full_tiles,
        sliding_tiles=sliding_tiles,
    )


def _checked_bounds(cu_seqlens: Tensor | Sequence[int]) -> list[int]:
    if isinstance(cu_seqlens, Tensor):
        if cu_seqlens.ndim != 1 or cu_seqlens.is_floating_point() or cu_seqlens.dtype == torch.bool:
            raise ConfigError(
                f"cu_seqlens must be a 1-D integer tensor, not {cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}"
            )
        bounds = cu_seqlens.tolist()
    else:
        bounds = list(cu_seqlens)
        if not all(isinstance(bound, int) for bound in bounds):
            raise ConfigError(f"cu_seqlens must be a flat sequence of integers, not {bounds[:4]}...")
    if not bounds or bounds[0] != 0:
        raise ConfigError(f"cu_seqlens must start at 0, not {bounds[:1]}")
    for i, (a, b) in enumerate(pairwise(bounds)):
        if b < a:
            raise ConfigError(f"cu_seqlens must not decrease: entry {i + 1} is {b} after {a}")
    return bounds


def _full_tiles(bounds: list[int], document_starts: Tensor, triangle: Tensor) -> Tiles:
    """Tiles for full causal attention: neighbouring short documents share tiles, each long document has its own."""
    tiles: list[TileRun | LongDocument] = []
    for short, group in groupby(pairwise(bounds), key=lambda document: document[1] - document[0] <= SHORT_DOCUMENT):
        documents = list(group)
        if short:
            longest = max(b - a for a, b in documents)
            tiles.extend(_shared_tiles(documents[0][0], documents[-1][1], longest, document_starts))
        else:
            tiles.extend(LongDocument(a, b, b - a, triangle) for a, b in documents)
    return tuple(tiles)


def _shared_tiles(start: int, stop: int, window: int, first_keys: Tensor) -> list[TileRun]:
    """Tiles over the rows [start, stop); query i sees the keys [first_keys[i], i].

    No first key lies before `start` or more than window - 1 rows back. Rows per tile: half the window's power of two,
    16 to 64 (for window 128 that is 64 x 192, the fastest measured).
    """
    rows = min(SHARED_ROWS, max(16, 1 << max(0, (window - 1).bit_length() - 1)))
    reach = -(-(window - 1) // rows) * rows
    whole, rest = divmod(stop - start, rows)
    lead = min(whole, reach // rows)
    # (first tile, tiles, rows, reach): the first tiles have fewer keys before them, the last one may have fewer rows.
    plan = [(tile, 1, rows, tile * rows) for tile in range(lead)]
    plan += [(lead, whole - lead, rows, reach)] if whole > lead else []
    plan += [(whole, 1, rest, min(reach, whole * rows))] if rest else []
    runs = []
    for tile, count, tile_rows, tile_reach in plan:
        first = start + tile * rows
        query = torch.arange(first, first + count * tile_rows, device=first_keys.device).view(count, tile_rows, 1)
        key = query[:, :1] + torch.arange(-tile_reach, tile_rows, device=first_keys.device)
        hidden = (key > query) | (key < first_keys[first : first + count * tile_rows].view(query.shape))
        runs.append(TileRun(first, tile_rows, tile_reach, count, _bias(hidden)))
    return runs


def _bias(hidden: Tensor) -> Tensor:
    return torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, float("-inf"))
