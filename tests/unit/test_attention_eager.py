"""The reference backend against the definition, and its explicit masks."""

import pytest
import torch
from attention_oracle import bounds, forward_backward, oracle_attention, random_inputs, relative_error

from automimo.attention import DenseLayout, attend, build_layout
from automimo.errors import ConfigError


@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 1), (2, 2)])
def test_eager_is_the_definition(window, with_sink, heads, kv_heads):
    lengths = [5, 1, 0, 7]
    q, k, v, sink, dout = random_inputs(13, heads=heads, kv_heads=kv_heads, sink=with_sink, dtype=torch.float64)
    layout = build_layout(bounds(lengths), window=window)
    result = forward_backward(q, k, v, sink, dout, layout=layout, window=window, backend="eager")
    leaves = [x.clone().requires_grad_() for x in (q, k, v)] + ([sink.clone().requires_grad_()] if with_sink else [])
    expected = oracle_attention(*leaves[:3], leaves[3] if with_sink else None, lengths, window, 0.4)
    expected.backward(dout)
    assert relative_error(result["out"], expected.detach()) < 1e-13
    for name, leaf in zip(("dq", "dk", "dv", "dsink"), leaves, strict=False):
        tolerance = 1e-6 if name == "dsink" else 1e-13  # the sink and so its gradient is fp32
        assert relative_error(result[name], leaf.grad) < tolerance, name


def test_sink_takes_weight_away_and_adds_no_value():
    q, k, v, _, _ = random_inputs(6, heads=2, kv_heads=1)
    v = torch.ones_like(v)
    layout = build_layout([0, 6], window=None)
    sink = torch.tensor([0.0, 2.0])
    out = attend(q, k, v, layout=layout, window=None, sink=sink, scale=0.0, backend="eager")
    for i in range(6):  # all scores 0: i + 1 keys of weight 1 next to a sink of weight exp(sink)
        for head in range(2):
            expected = (i + 1) / (i + 1 + float(sink[head].exp()))
            assert torch.allclose(out[i, head], torch.full((6,), expected), atol=1e-6)


def test_dense_layout_of_bool_masks_equals_documents():
    lengths, size = [3, 5], 5
    q, k, v, sink, dout = random_inputs(8)
    row = torch.arange(size)
    causal = row[:, None] >= row
    near = causal & (row[:, None] - row < 2)
    keys = row < torch.tensor(lengths)[:, None]
    dense = DenseLayout(2, size, (causal & keys[:, None])[:, None], (near & keys[:, None])[:, None])
    packed = build_layout(bounds(lengths), window=2)
    real = torch.tensor([0, 1, 2, 5, 6, 7, 8, 9])

    def padded(x):
        full = torch.full((10, *x.shape[1:]), 7.0)
        full[real] = x
        return full

    for window in (None, 2):
        grads = padded(dout)
        grads[3:5] = 0  # the padded rows of the first sequence
        wide = forward_backward(
            padded(q), padded(k), padded(v), sink, grads, layout=dense, window=window, backend="eager"
        )
        tight = forward_backward(q, k, v, sink, dout, layout=packed, window=window, backend="eager")
        for name, expected in tight.items():
            value = wide[name] if name == "dsink" else wide[name][real]
            assert relative_error(value, expected) < 1e-6, (window, name)


@pytest.mark.parametrize("hidden", [float("-inf"), torch.finfo(torch.float32).min])
def test_floating_masks_are_added(hidden):
    q, k, v, sink, dout = random_inputs(6)
    visible = torch.ones(6, 6, dtype=torch.bool).tril()
    visible[4, 1] = visible[5, 3] = False  # holes
    boolean = DenseLayout(1, 6, visible[None, None], None)
    zero = torch.zeros(6, 6).masked_fill(~visible, hidden)
    shifted = DenseLayout(1, 6, zero[None, None], None)
    a = forward_backward(q, k, v, sink, dout, layout=boolean, window=None, backend="eager")
    b = forward_backward(q, k, v, sink, dout, layout=shifted, window=None, backend="eager")
    for name, expected in a.items():
        assert relative_error(b[name], expected) < 1e-6, name

    # A bias per head: adding log 3 to one key triples its weight.
    bias = torch.zeros(1, 4, 6, 6)
    bias[0, 2, :, 0] = torch.tensor(3.0).log()
    q0 = torch.zeros_like(q)
    out = attend(q0, k, v, layout=DenseLayout(1, 6, bias, None), window=None, sink=None, scale=1.0, backend="eager")
    assert torch.allclose(out[:, 0], v[:, 0].mean(0).expand(6, -1), atol=1e-6)
    weights = torch.tensor([3.0, 1, 1, 1, 1, 1]) / 8
    assert torch.allclose(out[:, 2], (weights @ v[:, 1]).expand(6, -1), atol=1e-6)


@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("kind", ["bool", "-inf", "minimum"])
def test_rows_that_see_nothing_give_zero_and_no_nan(with_sink, kind):
    q, k, v, sink, dout = random_inputs(4, sink=with_sink)
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    mask[1] = False
    if kind != "bool":
        mask = torch.zeros(4, 4).masked_fill(~mask, float(kind) if kind == "-inf" else torch.finfo(torch.float32).min)
    layout = DenseLayout(1, 4, mask[None, None], None)
    result = forward_backward(q, k, v, sink, dout, layout=layout, window=None, backend="eager")
    assert all(tensor.isfinite().all() for tensor in result.values())
    assert (result["out"][1] == 0).all()
    assert (result["dq"][1] == 0).all()
    assert (result["out"][2] != 0).any()


def test_dense_layout_errors_name_shape_and_choice():
    good = torch.ones(2, 1, 3, 3, dtype=torch.bool)
    assert DenseLayout(2, 3, good, None).total == 6
    for bad in (good[0], good[:, :, :2], torch.ones(3, 1, 3, 3, dtype=torch.bool)):
        with pytest.raises(ConfigError, match=r"full_mask has shape .* broadcast to \[2, heads, 3, 3\]"):
            DenseLayout(2, 3, bad, None)
    with pytest.raises(ConfigError, match=r"sliding_mask has dtype torch\.int64"):
        DenseLayout(2, 3, None, good.long())
    q, k, v, _, _ = random_inputs(6)
    with pytest.raises(ConfigError, match="needs sliding_mask"):
        attend(q, k, v, layout=DenseLayout(2, 3, good, None), window=2, sink=None, scale=1.0, backend="eager")
    with pytest.raises(ConfigError, match="use attention 'eager'"):
        attend(q, k, v, layout=DenseLayout(2, 3, good, None), window=None, sink=None, scale=1.0, backend="sdpa")
