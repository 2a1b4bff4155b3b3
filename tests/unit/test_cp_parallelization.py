"""Setting up context parallelism on a model: which layers, once per group, and never on half a model."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cp_oracle import FakeMesh
from tiny_text import tiny_model
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper

from automimo.errors import ConfigError
from automimo.mimo_v2_flash import parallelization
from automimo.mimo_v2_flash.parallelization import (
    _unwrap_checkpoint_module,
    ensure_mimo_te_context_parallel,
    setup_mimo_te_context_parallel,
)


class Attention(nn.Module):
    def __init__(self, failure: Exception | None = None) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any]] = []
        self.failure = failure

    def setup_cp_attention(self, cp_mesh: Any, cp_stream: Any = None) -> None:
        if self.failure is not None:
            raise self.failure
        self.calls.append((cp_mesh, cp_stream))


class Block(nn.Module):
    def __init__(self, attention: nn.Module, name: str = "self_attn") -> None:
        super().__init__()
        self.add_module(name, attention)
        self.mlp = nn.Linear(2, 2)


class Model(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(3 + i): block for i, block in enumerate(blocks)})


def mesh(ranks: int = 2, **changes: Any) -> FakeMesh:
    return FakeMesh(ranks, **{"group": object(), **changes})


def test_unwrapping() -> None:
    inner = nn.Linear(1, 1)
    assert _unwrap_checkpoint_module(inner) is inner
    assert _unwrap_checkpoint_module(checkpoint_wrapper(inner)) is inner
    assert _unwrap_checkpoint_module(checkpoint_wrapper(checkpoint_wrapper(inner))) is inner
    other = offload_wrapper(inner)
    assert _unwrap_checkpoint_module(other) is other  # not a checkpoint wrapper


def test_every_layer_is_set_up_beneath_its_wrappers() -> None:
    plain, wrapped, twice, in_block = (Attention() for _ in range(4))
    model = Model(
        Block(plain),
        Block(checkpoint_wrapper(wrapped)),
        Block(checkpoint_wrapper(checkpoint_wrapper(twice))),
        checkpoint_wrapper(Block(in_block)),
    )
    cp_mesh = mesh()
    setup_mimo_te_context_parallel(model, cp_mesh)
    for attention in (plain, wrapped, twice, in_block):
        assert attention.calls == [(cp_mesh, None)]  # a mesh of CPUs has no CUDA stream
    assert model._mimo_te_cp_configured_group is cp_mesh.group


def test_on_gpus_all_layers_share_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    streams: list[object] = []

    def make() -> object:
        streams.append(object())
        return streams[-1]

    monkeypatch.setattr(parallelization.torch.cuda, "Stream", make)
    attentions = [Attention(), Attention()]
    setup_mimo_te_context_parallel(Model(*map(Block, attentions)), mesh(device_type="cuda"))
    assert len(streams) == 1
    assert [call[1] for a in attentions for call in a.calls] == [streams[0]] * 2


@pytest.mark.parametrize("single", [None, FakeMesh(1)])
def test_a_single_rank_is_only_noted(single: FakeMesh | None) -> None:
    attention = Attention()
    model = Model(Block(attention))
    ensure_mimo_te_context_parallel(model, single)
    assert not hasattr(model, "_mimo_te_cp_configured_group")
    setup_mimo_te_context_parallel(model, single)
    assert model._mimo_te_cp_configured_group is None
    assert not attention.calls


def test_the_identity_of_the_group_decides() -> None:
    attention = Attention()
    model = Model(Block(attention))
    first = mesh()
    ensure_mimo_te_context_parallel(model, first)
    ensure_mimo_te_context_parallel(model, FakeMesh(2, group=first.group))
    ensure_mimo_te_context_parallel(model, FakeMesh(1))
    assert attention.calls == [(first, None)]
    second = mesh()
    ensure_mimo_te_context_parallel(model, second)
    assert attention.calls == [(first, None), (second, None)]
    setup_mimo_te_context_parallel(model, second)
    assert len(attention.calls) == 3
    setup_mimo_te_context_parallel(model, None)
    ensure_mimo_te_context_parallel(model, second)
    assert len(attention.calls) == 4


def test_layers_elsewhere() -> None:
    with pytest.raises(ConfigError, match=r"Model has no attention layer.*'self_attn'"):
        setup_mimo_te_context_parallel(Model(Block(Attention(), name="attention")), mesh())
    with pytest.raises(ConfigError, match="no attention layer"):
        ensure_mimo_te_context_parallel(Model(), mesh())


def test_a_layer_without_the_hook_stops_before_any_is_changed() -> None:
    good, bad = Attention(), nn.Linear(2, 2)
    model = Model(Block(good), Block(checkpoint_wrapper(bad)))
    with pytest.raises(ConfigError, match=r"layers\.4\.self_attn: Linear has no setup_cp_attention"):
        setup_mimo_te_context_parallel(model, mesh())
    assert not good.calls
    bad.setup_cp_attention = 3
    with pytest.raises(ConfigError, match="has no setup_cp_attention"):
        setup_mimo_te_context_parallel(model, mesh())


def test_what_a_hook_raises_is_passed_on_and_nothing_counts_as_set_up() -> None:
    attention = Attention()
    model, cp_mesh = Model(Block(attention)), mesh()
    setup_mimo_te_context_parallel(model, cp_mesh)
    failing = ConfigError("requires both query and key/value head counts to divide")
    model.layers["9"] = Block(Attention(failing))
    with pytest.raises(ConfigError, match="requires both query and key/value head counts"):
        setup_mimo_te_context_parallel(model, mesh())
    assert model._mimo_te_cp_configured_group is None
    del model.layers["9"]
    ensure_mimo_te_context_parallel(model, cp_mesh)
    assert attention.calls[-1] == (cp_mesh, None)
    assert len(attention.calls) == 3


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_heads_of_the_model_that_the_ranks_cannot_share(attention: str) -> None:
    model = tiny_model(attn=attention)  # 4 query heads, 1 and 2 key-value heads
    group = SimpleNamespace(size=lambda: 3, rank=lambda: 0)
    with pytest.raises(ValueError, match=r"3 ranks requires both query and key/value head counts .* has 4 and 1"):
        setup_mimo_te_context_parallel(model, mesh(3, group=group))
    assert model._mimo_te_cp_configured_group is None


def test_the_model_s_own_state_is_not_touched() -> None:
    model = Model(Block(Attention()))
    before = list(model.state_dict())
    setup_mimo_te_context_parallel(model, mesh())
    assert list(model.state_dict()) == before
    assert isinstance(model.layers["3"].mlp.weight, torch.Tensor)
