"""The key-value cache: decoding equals the uncached forward, and holds no more than it should."""

import pytest
import torch
from attention_oracle import bounds, random_inputs
from hypothesis import given, settings
from hypothesis import strategies as st

from automimo.attention import DenseLayout, KVCache, attend, build_layout
from automimo.errors import ConfigError

SCALE = 0.4


class Layers:
    """A full and a sliding layer with fixed inputs for B sequences, cached and uncached."""

    def __init__(self, lengths, window, sinks=(False, True), backend="sdpa", dtype=torch.float32, seed=0):
        self.windows, self.backend = (None, window), backend
        self.inputs = [
            random_inputs(sum(lengths), sink=sinks[layer], seed=seed + layer, dtype=dtype) for layer in range(2)
        ]
        layout = build_layout(bounds(lengths), window=window)
        self.expected = [
            attend(*x[:3], layout=layout, window=w, sink=x[3], scale=SCALE, backend=backend).split(lengths)
            for x, w in zip(self.inputs, self.windows, strict=True)
        ]
        self.documents = [[x.split(lengths) for x in inputs[:3]] for inputs in self.inputs]

    def pick(self, layer, sequences, start, stop):
        """q, k, v of the tokens [start[b], stop[b]) of each sequence, packed."""
        return [
            torch.cat([documents[b][a:z] for b, a, z in zip(sequences, start, stop, strict=True)])
            for documents in self.documents[layer]
        ]

    def step(self, cache, sequences, start, stop, layout):
        """Run both layers on the cache; the largest difference to the uncached forward."""
        worst = 0.0
        for layer in range(2):
            out = cache.attend(
                layer,
                *self.pick(layer, sequences, start, stop),
                layout=layout,
                window=self.windows[layer],
                sink=self.inputs[layer][3],
                scale=SCALE,
                backend=self.backend,
            )
            expected = torch.cat([self.expected[layer][b][a:z] for b, a, z in zip(sequences, start, stop, strict=True)])
            assert out.dtype == expected.dtype
            worst = max([worst, *(out - expected).abs().flatten().tolist()])
        return worst


def run_generation(layers, prompts, steps, window, drop_at=None, keep=None):
    sequences = list(range(len(prompts)))
    seen = list(prompts)
    cache = KVCache(2)
    worst = layers.step(cache, sequences, [0] * len(prompts), prompts, build_layout(bounds(prompts), window=window))
    assert cache.lengths.tolist() == prompts
    for n in range(steps):
        if n == drop_at:
            cache.drop(torch.tensor(keep))
            sequences, seen = [sequences[i] for i in keep], [seen[i] for i in keep]
        assert cache.lengths.tolist() == seen
        grown = [length + 1 for length in seen]
        worst = max(worst, layers.step(cache, sequences, seen, grown, None))
        seen = grown
    assert cache.lengths.tolist() == seen
    return worst, cache


@settings(max_examples=25, deadline=None)
@given(
    prompts=st.lists(st.integers(0, 90), min_size=1, max_size=4),
    steps=st.integers(1, 90),
    window=st.sampled_from([1, 2, 7, 16, 64, 65, 100, 300]),
    sinks=st.sampled_from([(False, True), (True, False)]),
)
def test_decoding_equals_the_uncached_forward(prompts, steps, window, sinks):
    layers = Layers([length + steps for length in prompts], window, sinks)
    worst, _ = run_generation(layers, prompts, steps, window)
    assert worst < 1e-5  # values of order 1, sums in another order


def test_in_double_precision_the_cache_is_exact():
    layers = Layers([50, 80, 31], 8, dtype=torch.float64, backend="eager")
    worst, _ = run_generation(layers, [20, 50, 1], 30, 8)
    assert worst < 1e-13


def test_finished_sequences_can_be_dropped_and_reordered():
    layers = Layers([60, 90, 45, 70], 8)
    worst, cache = run_generation(layers, [20, 50, 5, 30], 40, 8, drop_at=15, keep=[3, 0])
    assert worst < 1e-5
    assert cache.batch == 2
    cache.drop(torch.tensor([], dtype=torch.int64))
    assert cache.batch == 0
    assert cache.nbytes() == 0


def test_sliding_layers_hold_the_window_and_full_layers_grow_by_doubling():
    prompts, window, steps = [100, 40], 16, 300
    per_token = 2 * (8 + 6) * 4  # kv heads x (key + value width) x bytes
    sliding, full = KVCache(1), KVCache(1)
    sizes = []
    for cache, w in ((sliding, window), (full, None)):
        q, k, v, _, _ = random_inputs(140)
        layout = build_layout(bounds(prompts), window=w)
        cache.attend(0, q, k, v, layout=layout, window=w, sink=None, scale=SCALE, backend="sdpa")
        for n in range(steps):
            q, k, v, _, _ = random_inputs(2, seed=n)
            cache.attend(0, q, k, v, layout=None, window=w, sink=None, scale=SCALE, backend="sdpa")
            assert sliding.nbytes() == 2 * window * per_token
            sizes.append(cache.nbytes())
    assert full.lengths.tolist() == [400, 340]
    assert 2 * 400 * per_token <= full.nbytes() < 2 * 800 * per_token
    # Buffers are copied only when they double: a handful of sizes over 300 steps.
    assert len(set(sizes)) <= 5


def test_a_window_wider_than_everything_costs_no_more_than_the_tokens():
    q, k, v, _, _ = random_inputs(10)
    cache = KVCache(1)
    layout = build_layout([0, 10], window=10**9)
    cache.attend(0, q, k, v, layout=layout, window=10**9, sink=None, scale=SCALE, backend="sdpa")
    assert cache.nbytes() < 100 * 2 * (8 + 6) * 4


def test_lengths_stand_still_until_the_last_layer():
    q, k, v, _, _ = random_inputs(5)
    cache = KVCache(2)
    kwargs = {"window": None, "sink": None, "scale": SCALE, "backend": "sdpa"}
    layout = build_layout([0, 2, 5], window=None)
    assert cache.lengths.tolist() == []
    cache.attend(1, q, k, v, layout=layout, **kwargs)
    assert cache.lengths.tolist() == []
    cache.attend(0, q, k, v, layout=layout, **kwargs)
    lengths = cache.lengths
    assert lengths.tolist() == [2, 3]
    cache.attend(0, q[:2], k[:2], v[:2], layout=None, **kwargs)
    assert cache.lengths.tolist() == [2, 3]
    with pytest.raises(ConfigError, match=r"layer 0 attended twice in one step; layers \[1\]"):
        cache.attend(0, q[:2], k[:2], v[:2], layout=None, **kwargs)
    with pytest.raises(ConfigError, match="middle of a step"):
        cache.drop(torch.tensor([0]))
    cache.attend(1, q[:2], k[:2], v[:2], layout=None, **kwargs)
    assert cache.lengths.tolist() == [3, 4]
    assert lengths.tolist() == [2, 3]


def test_no_graph_is_kept():
    q, k, v, _, _ = random_inputs(4)
    q.requires_grad_()
    cache = KVCache(1)
    layout = build_layout([0, 4], window=None)
    out = cache.attend(0, q, k, v, layout=layout, window=None, sink=None, scale=SCALE, backend="sdpa")
    assert not out.requires_grad


def test_misuse_is_named():
    q, k, v, _, _ = random_inputs(4)
    kwargs = {"window": None, "sink": None, "scale": SCALE}
    layout = build_layout([0, 4], window=None)
    with pytest.raises(ConfigError, match="num_layers=0"):
        KVCache(0)
    cache = KVCache(1)
    with pytest.raises(ConfigError, match="layer 1 does not exist"):
        cache.attend(1, q, k, v, layout=layout, backend="sdpa", **kwargs)
    with pytest.raises(ConfigError, match="choose one of"):
        cache.attend(0, q, k, v, layout=layout, backend="flex", **kwargs)
    dense = DenseLayout(1, 4, torch.ones(1, 1, 4, 4, dtype=torch.bool), None)
    for wrong in (None, dense):
        with pytest.raises(ConfigError, match="DocumentLayout of the prompts"):
            cache.attend(0, q, k, v, layout=wrong, backend="eager", **kwargs)
    cache.attend(0, q, k, v, layout=layout, backend="sdpa", **kwargs)
    with pytest.raises(ConfigError, match="do not have the 1 tokens"):
        cache.attend(0, q, k, v, layout=None, backend="sdpa", **kwargs)
    with pytest.raises(ConfigError, match="cached with window None and is now asked for 3"):
        cache.attend(0, q[:1], k[:1], v[:1], layout=None, backend="sdpa", **(kwargs | {"window": 3}))
    with pytest.raises(ConfigError, match="beyond the 1 sequences"):
        cache.drop(torch.tensor([1]))
