"""Attention by the definition: one query and one head at a time, in fp64, differentiable. And inputs for the tests."""

from collections.abc import Sequence

import torch
from torch import Tensor

from automimo.attention import DenseLayout, DocumentLayout, attend


def visible_keys(lengths: Sequence[int], window: int | None) -> list[range]:
    """For each row of the stream the rows that it sees."""
    ranges, start = [], 0
    for length in lengths:
        ranges += [range(max(start, i - window + 1) if window else start, i + 1) for i in range(start, start + length)]
        start += length
    return ranges


def oracle_attention(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, lengths: Sequence[int], window: int | None, scale: float
) -> Tensor:
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    rows = []
    for i, keys in enumerate(visible_keys(lengths, window)):
        heads = []
        for h in range(q.shape[1]):
            logits = torch.stack([(q[i, h] * k[j, h // group]).sum() * scale for j in keys])
            if sink is not None:
                logits = torch.cat([logits, sink[h : h + 1].double()])
            weights = torch.exp(logits - logits.max()) / torch.exp(logits - logits.max()).sum()
            heads.append(sum(weights[n] * v[j, h // group] for n, j in enumerate(keys)))
        rows.append(torch.stack(heads))
    return torch.stack(rows)


def bounds(lengths: Sequence[int]) -> list[int]:
    return [sum(lengths[:n]) for n in range(len(lengths) + 1)]


def random_inputs(
    tokens: int,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    width: int = 8,
    value_width: int = 6,
    sink: bool = True,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """q, k, v, sink (None unless wanted) and a gradient for the output."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    q, k, v = normal(tokens, heads, width), normal(tokens, kv_heads, width), normal(tokens, kv_heads, value_width)
    sinks = torch.randn(heads, generator=generator) if sink else None
    return q, k, v, sinks, normal(tokens, heads, value_width)


def forward_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    dout: Tensor,
    *,
    layout: DocumentLayout | DenseLayout,
    window: int | None,
    backend: str,
    scale: float = 0.4,
) -> dict[str, Tensor]:
    """out, dq, dk, dv and, with a sink, dsink."""
    leaves = {"q": q, "k": k, "v": v} | ({} if sink is None else {"sink": sink})
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in leaves.items()}
    out = attend(
        leaves["q"],
        leaves["k"],
        leaves["v"],
        layout=layout,
        window=window,
        sink=leaves.get("sink"),
        scale=scale,
        backend=backend,
    )
    out.backward(dout)
    return {"out": out.detach()} | {f"d{name}": tensor.grad for name, tensor in leaves.items()}


def relative_error(value: Tensor, reference: Tensor, floor: float = 1e-3) -> float:
    """Norm of the difference over the norm of the reference. `floor` keeps gradients that are 0 in truth comparable."""
    difference = (value.double() - reference.double()).norm()
    return (difference / reference.double().norm().clamp_min(floor)).item()
