"""Keys and values of the tokens a generation has seen: all of them on full layers, only the window on sliding ones.

B sequences, H query heads, K key/value heads, G = H / K, D width of q and k, V width of v, N cached places of a
sequence.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from automimo.attention.dispatch import attend, check_backend, check_shapes
from automimo.attention.eager import masked_softmax
from automimo.attention.layout import DenseLayout, DocumentLayout
from automimo.errors import ConfigError

# Places allocated at first, beyond the prompt; later growth doubles, so that n tokens cost O(n) copying in total.
MIN_PLACES = 64


@dataclass
class _LayerCache:
    """One layer's keys [B, K, N, D] and values [B, K, N, V]; token p of a sequence lies at place p, or p % window."""

    keys: Tensor
    values: Tensor
    window: int | None

    def make_room(self, tokens: int) -> None:
        """Places for sequences of `tokens` tokens; a window needs no more than itself, and grows before it wraps."""
        places = self.keys.shape[2]
        needed = tokens if self.window is None else min(tokens, self.window)
        if needed > places:
            grown = max(needed, 2 * places)
            grown = grown if self.window is None else min(grown, self.window)
            self.keys = torch.nn.functional.pad(self.keys, (0, 0, 0, grown - places))
            self.values = torch.nn.functional.pad(self.values, (0, 0, 0, grown - places))


class KVCache:
    """The cache of one generation: B sequences of different lengths, every layer of a model, used under no_grad.

    The first `attend` of a layer takes the packed prompts, each later one exactly one new token per sequence (T = B, in
    the order of the sequences). `lengths` counts the tokens that *all* layers have seen: it stands still while the
    layers of a step run, so that it gives the position of the step's tokens, and advances when the last of them is
    done. A sliding layer holds at most `window` tokens per sequence; a full layer's memory grows by doubling.

    Example:
        cache = KVCache(num_layers)
        run the model on the prompts; each attention layer calls cache.attend(layer, q, k, v, layout=layout, ...)
        run it on B new tokens at positions cache.lengths; cache.attend(layer, q, k, v, layout=None, ...)
    """

    def __init__(self, num_layers: int) -> None:
        if num_layers < 1:
            raise ConfigError(f"a cache needs at least one layer, got num_layers={num_layers}")
        self.num_layers = num_layers
        self._layers: dict[int, _LayerCache] = {}
        self._lengths: list[int] = []
        self._lengths_B = torch.zeros(0, dtype=torch.int64)
        self._prompt: DocumentLayout | None = None
        # Layers that have attended in the step that is under way.
        self._done: set[int] = set()
        self._prefilled = False

    @property
    def lengths(self) -> Tensor:
        """int64 [B]: tokens of each sequence that all layers have seen, its next position (empty before the prompt)."""
        return self._lengths_B

    @property
    def batch(self) -> int:
        """Sequences in the cache (0 before the prompt)."""
        return len(self._lengths)

    def nbytes(self) -> int:
        """Bytes of all cached keys and values, free places included."""
        return sum(tensor.nbytes for layer in self._layers.values() for tensor in (layer.keys, layer.values))

    @torch.no_grad()
    def attend(
        self,
        layer_idx: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        layout: DocumentLayout | None,
        window: int | None,
        sink: Tensor | None,
        scale: float,
        backend: str,
    ) -> Tensor:
        """Like `automimo.attention.attend` [T, H, V], for tokens that continue what the cache holds, and store them.

        The prompt pass needs `layout`; later passes ignore it and expect T = B.

        Raises:
            ConfigError: an unknown backend, tensors that do not fit, a prompt without a DocumentLayout, a layer that is
                out of range or attends twice in one step.
        """
        check_backend(backend)
        if not 0 <= layer_idx < self.num_layers:
            raise ConfigError(f"layer {layer_idx} does not exist in a cache of {self.num_layers} layers")
        if layer_idx in self._done:
            missing = sorted(set(range(self.num_layers)) - self._done)
            raise ConfigError(f"layer {layer_idx} attended twice in one step; layers {missing} have not attended yet")
        if self._prefilled:
            out = self._decode(layer_idx, q, k, v, window, sink, scale)
        else:
            out = self._prefill(layer_idx, q, k, v, layout, window, sink, scale, backend)
        self._done.add(layer_idx)
        if len(self._done) == self.num_layers:
            self._finish_step()
        return out

    def drop(self, keep_indices: Tensor) -> None:
        """Keep only these sequences (int64 [B'], in the order wanted); call between steps.

        Raises:
            ConfigError: called in the middle of a step, or an index that does not exist.
        """
        kept = keep_indices.tolist()
        if self._done:
            raise ConfigError(
                f"sequences cannot be dropped in the middle of a step (layers {sorted(self._done)} are done)"
            )
        if any(not 0 <= index < self.batch for index in kept):
            raise ConfigError(f"keep_indices {kept} go beyond the {self.batch} sequences of the cache")
        self._lengths = [self._lengths[index] for index in kept]
        self._lengths_B = self._lengths_B[keep_indices.to(self._lengths_B.device)]
        for layer in self._layers.values():
            index = keep_indices.to(layer.keys.device)
            layer.keys, layer.values = layer.keys[index], layer.values[index]

    def _finish_step(self) -> None:
        self._done.clear()
        if not self._prefilled:
            assert self._prompt is not None
            self._lengths = list(self._prompt.lengths)
            self._lengths_B = self._prompt.cu_seqlens.diff().long()
            self._prefilled, self._prompt = True, None
        else:
            self._lengths = [length + 1 for length in self._lengths]
            # Not in place: whoever holds the lengths of the last step keeps them.
            self._lengths_B = self._lengths_B + 1

    def _prefill(
        self,
        layer_idx: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: DocumentLayout | None,
        window: int | None,
        sink: Tensor | None,
        scale: float,
        backend: str,
    ) -> Tensor:
        if layout is None or isinstance(layout, DenseLayout):
            raise ConfigError(
                "the first pass through a cache needs the DocumentLayout of the prompts, one document each"
            )
        if self._prompt is not None and self._prompt.lengths != layout.lengths:
            raise ConfigError("all layers of the prompt pass must be given the same layout")
        self._prompt = layout
        out = attend(q, k, v, layout=layout, window=window, sink=sink, scale=scale, backend=backend)
        places = layout.max_length + MIN_PLACES if window is None else min(window, layout.max_length + MIN_PLACES)
        batch = len(layout.lengths)
        layer = _LayerCache(
            k.new_zeros(batch, k.shape[1], places, k.shape[2]),
            v.new_zeros(batch, v.shape[1], places, v.shape[2]),
            window,
        )
        document_T, place_T = layout.document_ids, layout.position_ids
        if window is not None and window < layout.max_length:
            lengths_D = layout.cu_seqlens.diff()
            last_T = (place_T >= lengths_D[document_T] - window).nonzero().squeeze(1)
            document_T, place_T, k, v = document_T[last_T], place_T[last_T] % window, k[last_T], v[last_T]
        layer.keys[document_T, :, place_T] = k
        layer.values[document_T, :, place_T] = v
        self._layers[layer_idx] = layer
        return out

    def _decode(
        self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, window: int | None, sink: Tensor | None, scale: float
    ) -> Tensor:
        layer = self._layers[layer_idx]
        check_shapes(q, k, v, sink, self.batch)
        if window != layer.window:
            raise ConfigError(f"layer {layer_idx} was cached with window {layer.window} and is now asked for {window}")
        longest = max(self._lengths, default=0) + 1
        layer.make_room(longest)
        sequence_B, position_B = torch.arange(self.batch, device=q.device), self._lengths_B
        place_B = position_B if window is None else position_B % window
        layer.keys[sequence_B, :, place_B] = k
        layer.values[sequence_B, :, place_B] = v

        used = min(longest, layer.keys.shape[2])
        k_BKND, v_BKNV = layer.keys[:, :, :used], layer.values[:, :, :used]
        q_BKGD = q.unflatten(1, (k.shape[1], -1))
        scores_BHN = (q_BKGD @ k_BKND.transpose(-1, -2)).flatten(1, 2)
        # A ring that has wrapped is visible throughout; before that, places up to the query's own are.
        visible_B1N = (torch.arange(used, device=q.device) <= position_B[:, None])[:, None]
        p_BHN = masked_softmax(scores_BHN, visible_B1N, None, sink, scale)
        p_BKGN = p_BHN.to(v.dtype).unflatten(1, (k.shape[1], -1))
        return (p_BKGN @ v_BKNV).flatten(1, 2)
