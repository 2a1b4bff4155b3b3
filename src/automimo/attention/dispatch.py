"""The one entry to attention: checks, then the backend."""

from torch import Tensor

from automimo.attention.eager import eager_attention
from automimo.attention.layout import DenseLayout, DocumentLayout
from automimo.attention.tiled import tiled_attention
from automimo.errors import ConfigError

_BACKENDS = ("eager", "sdpa")


def available_backends() -> tuple[str, ...]:
    """Names that `attend` accepts here."""
    return _BACKENDS


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: DocumentLayout | DenseLayout,
    window: int | None,
    sink: Tensor | None,
    scale: float,
    backend: str,
) -> Tensor:
    """Causal attention of the token stream that `layout` describes -> [T, heads, dv] in the dtype of q.

    q [T, heads, d], k [T, kv, d], v [T, kv, dv]; query head h reads key/value head h // (heads / kv). `window` is the
    number of keys a query sees, itself included (None: all earlier ones of its document). `sink` [heads] is one more
    softmax column per head with this logit and the value 0 (None: no such column). The softmax runs in fp32, whatever
    the dtype of q. Differentiable in q, k, v and sink.

    `eager` is the dense reference; `sdpa` gives the same result in memory linear in T, at T x window cost on sliding
    layers.

    Raises:
        ConfigError: tensors that do not fit the layout or each other, a window the layout was not built for, a backend
        that
            is unknown or cannot take this layout.
    """
    check_backend(backend)
    check_shapes(q, k, v, sink, layout.total)
    if window is not None and window < 1:
        raise ConfigError(f"window is {window}; a query sees at least itself, so it must be 1 or more")
    if backend == "eager":
        return eager_attention(q, k, v, sink, layout=layout, window=window, scale=scale)
    if isinstance(layout, DenseLayout):
        raise ConfigError("attention 'sdpa' cannot take explicit masks (4-D, or 2-D with holes): use attention 'eager'")
    return tiled_attention(q, k, v, sink, tiles=layout.tiles(window), scale=scale)


def check_backend(name: str) -> None:
    """Raises ConfigError, listing what is available, unless `attend` accepts this backend here."""
    if name not in _BACKENDS:
        raise ConfigError(f"attention {name!r} is not available here; choose one of: {', '.join(_BACKENDS)}")


def check_shapes(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, total: int) -> None:
    """Raises ConfigError unless q, k, v and the sink fit each other and have `total` tokens."""
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.ndim == k.ndim == v.ndim == 3:
        raise ConfigError(f"q, k and v must be [tokens, heads, width], got {shapes}")
    if not q.shape[0] == k.shape[0] == v.shape[0] == total:
        raise ConfigError(f"{shapes} do not have the {total} tokens of the layout")
    if k.shape[1] != v.shape[1] or k.shape[1] == 0 or q.shape[1] % k.shape[1] != 0:
        raise ConfigError(f"query heads must be a multiple of the key/value heads, got {shapes}")
    if q.shape[2] != k.shape[2]:
        raise ConfigError(f"q and k must be equally wide, got {shapes}")
    if not q.dtype == k.dtype == v.dtype:
        raise ConfigError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if sink is not None and sink.shape != (q.shape[1],):
        raise ConfigError(f"the sink must have one entry per query head ({q.shape[1]}), got {tuple(sink.shape)}")
