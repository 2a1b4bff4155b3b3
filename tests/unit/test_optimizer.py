"""Parameter selection, AdamW groups, schedules, clipping, master weights."""

import itertools
import math

import pytest
import torch
from torch import nn

from automimo.distributed.gradients import clip_gradients, gradient_norm
from automimo.errors import ConfigError
from automimo.fp32 import KeepFp32
from automimo.training.optimizer import (
    lr_factor,
    make_optimizer,
    parameter_groups,
    select_trainable,
    set_learning_rate,
)
from automimo.training.precision import MasterWeights
from automimo.training.recipe import ModelSection, MoESection, OptimGroup, OptimSection


class Gate(KeepFp32):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8))


class Block(KeepFp32):
    def __init__(self) -> None:
        super().__init__()
        self.attention_sink_bias = nn.Parameter(torch.zeros(2))
        self.norm = nn.RMSNorm(8)
        self.proj = nn.Linear(8, 8)
        self.mlp = nn.Module()
        self.mlp.gate = Gate()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 8)
        self.layers = nn.ModuleDict({"0": Block(), "1": Block()})


def trained(model: nn.Module, rules: ModelSection, moe: MoESection | None = None) -> set[str]:
    select_trainable(model, rules, moe or MoESection())
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


# --- what is trained -------------------------------------------------------------------------------------------------


def test_everything_but_the_sinks_is_trained_by_default():
    model = Model()
    names = {name for name, _ in model.named_parameters()}
    assert trained(model, ModelSection()) == {name for name in names if not name.endswith("attention_sink_bias")}
    assert trained(model, ModelSection(train_sinks=True)) == names


def test_patterns_and_frozen_routers():
    model = Model()
    rules = ModelSection(train=("layers.*",), freeze=("*norm*", "layers.1.*"))
    expected = {"layers.0.proj.weight", "layers.0.proj.bias", "layers.0.mlp.gate.weight"}
    assert trained(model, rules) == expected
    assert trained(model, rules, MoESection(router="freeze")) == expected - {"layers.0.mlp.gate.weight"}


def test_counts():
    model = Model()
    total = 5 * 8 + 2 * (2 + 8 + 8 * 8 + 8 + 4 * 8)
    assert select_trainable(model, ModelSection(), MoESection()) == (total - 4, total)
    assert select_trainable(model, ModelSection(train=("embed.*",)), MoESection()) == (40, total)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (ModelSection(train=("layer.*",)), r"model.train: 'layer.\*' matches no parameter"),
        (
            ModelSection(freeze=("*", "nothing")),
            "model.freeze: 'nothing' matches no parameter; there are 11, such as e",
        ),
        (ModelSection(freeze=("*",)), "leave none of the 11 parameters to train"),
        (ModelSection(train=("*sink*",)), "sinks need model.train_sinks"),
    ],
)
def test_patterns_that_cannot_be_meant(rules: ModelSection, message: str):
    with pytest.raises(ConfigError, match=message):
        select_trainable(Model(), rules, MoESection())


# --- groups ----------------------------------------------------------------------------------------------------------


def settings_by_name(model: nn.Module, optim: OptimSection) -> dict[str, tuple[float, float]]:
    parameters = dict(model.named_parameters())
    names = {id(parameter): name for name, parameter in parameters.items()}
    out = {}
    for group in parameter_groups(parameters, optim):
        for parameter in group["params"]:
            assert names[id(parameter)] not in out
            out[names[id(parameter)]] = (group["lr"], group["weight_decay"])
            assert group["peak_lr"] == group["lr"]
    assert out.keys() == parameters.keys()
    return out


def test_norms_sinks_and_biases_never_decay():
    values = settings_by_name(Model(), OptimSection(lr=0.5, weight_decay=0.25))
    for name, (lr, decay) in values.items():
        flat = name.endswith(("norm.weight", "attention_sink_bias", "proj.bias"))
        assert (lr, decay) == (0.5, 0.0 if flat else 0.25), name


def test_the_first_group_that_matches_wins():
    groups = (
        OptimGroup(pattern="layers.0.*", lr=1.0),
        OptimGroup(pattern="*.proj.*", lr=2.0, weight_decay=0.0),
        OptimGroup(pattern="embed*", weight_decay=0.75),
    )
    values = settings_by_name(Model(), OptimSection(lr=0.5, weight_decay=0.25, groups=groups))
    assert values["layers.0.proj.weight"] == (1.0, 0.25)
    assert values["layers.0.norm.weight"] == (1.0, 0.0)
    assert values["layers.1.proj.weight"] == (2.0, 0.0)
    assert values["layers.1.mlp.gate.weight"] == (0.5, 0.25)
    assert values["embed.weight"] == (0.5, 0.75)


def test_groups_that_cannot_be_meant():
    parameters = dict(Model().named_parameters())
    with pytest.raises(ConfigError, match=r"optim.groups.1.pattern: 'x\*' matches no trainable parameter"):
        parameter_groups(parameters, OptimSection(groups=(OptimGroup(pattern="*"), OptimGroup(pattern="x*"))))
    with pytest.raises(ConfigError, match=r"optim.groups.0.weight_decay is 0.1, but '\*norm\*' matches only norms"):
        parameter_groups(parameters, OptimSection(groups=(OptimGroup(pattern="*norm*", weight_decay=0.1),)))


def test_the_optimizer_is_adamw():
    """Two steps against the formula of Loshchilov and Hutter, in float64."""
    torch.manual_seed(0)
    parameters = {"w": nn.Parameter(torch.randn(3, 4)), "norm": nn.Parameter(torch.randn(4))}
    optim = OptimSection(lr=0.01, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)
    optimizer = make_optimizer(parameters, optim)
    expected = {name: parameter.detach().double().clone() for name, parameter in parameters.items()}
    mean = {name: torch.zeros_like(value) for name, value in expected.items()}
    square = {name: torch.zeros_like(value) for name, value in expected.items()}
    for step in (1, 2):
        set_learning_rate(optimizer, 0.5)
        for name, parameter in parameters.items():
            parameter.grad = torch.randn_like(parameter)
            g = parameter.grad.double()
            mean[name] = 0.9 * mean[name] + 0.1 * g
            square[name] = 0.95 * square[name] + 0.05 * g**2
            update = (mean[name] / (1 - 0.9**step)) / ((square[name] / (1 - 0.95**step)).sqrt() + 1e-6)
            decay = 0.1 if name == "w" else 0.0
            expected[name] = expected[name] * (1 - 0.005 * decay) - 0.005 * update
        optimizer.step()
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter.detach().double(), expected[name], rtol=1e-6, atol=1e-6)


# --- schedule --------------------------------------------------------------------------------------------------------


def factors(total: int, **keys: object) -> list[float]:
    optim = OptimSection(**keys)
    return [lr_factor(step, total, optim) for step in range(1, total + 1)]


def test_warmup_then_constant():
    assert factors(6, schedule="constant", warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert factors(3, schedule="constant") == [1.0, 1.0, 1.0]


def test_linear():
    assert factors(6, schedule="linear", warmup_steps=2) == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25])
    assert factors(4, schedule="linear", min_lr_ratio=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4])


def test_cosine():
    expected = [0.5, 1.0] + [0.1 + 0.9 * (1 + math.cos(math.pi * k / 8)) / 2 for k in range(8)]
    assert factors(10, schedule="cosine", warmup_steps=2, min_lr_ratio=0.1) == pytest.approx(expected)
    middle = factors(9, schedule="cosine")[4]
    assert middle == pytest.approx((1 + math.cos(math.pi * 4 / 9)) / 2)


def test_wsd():
    expected = [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25]
    assert factors(10, schedule="wsd", warmup_steps=2, decay_share=0.4) == pytest.approx(expected)
    # a decay that would begin inside the warm-up begins after it
    assert factors(4, schedule="wsd", warmup_steps=2, decay_share=1.0) == pytest.approx([0.5, 1.0, 1.0, 0.5])


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
@pytest.mark.parametrize(("total", "warmup"), [(1, 0), (2, 1), (7, 3), (100, 10), (100, 99)])
def test_every_step_learns(schedule: str, total: int, warmup: int):
    values = factors(total, schedule=schedule, warmup_steps=warmup)
    assert all(0 < value <= 1 for value in values)
    assert max(values) == 1.0
    after = values[warmup:]
    assert all(a >= b for a, b in itertools.pairwise(after))


def test_each_group_keeps_its_own_peak():
    parameters = {"a": nn.Parameter(torch.zeros(2, 2)), "b": nn.Parameter(torch.zeros(2, 2))}
    optimizer = make_optimizer(parameters, OptimSection(lr=0.5, groups=(OptimGroup(pattern="b", lr=2.0),)))
    for factor in (0.1, 0.5, 1.0):
        set_learning_rate(optimizer, factor)
        assert sorted(group["lr"] for group in optimizer.param_groups) == [0.5 * factor, 2.0 * factor]


# --- clipping --------------------------------------------------------------------------------------------------------


def test_clipping_by_the_global_norm():
    a, b, unused = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    a.grad, b.grad = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])
    norm = gradient_norm([a, b, unused])
    assert norm == 5.0
    clip_gradients([a, b, unused], 10.0, norm)
    assert a.grad.tolist() == [3.0, 0.0] and b.grad.tolist() == [0.0, 4.0]
    clip_gradients([a, b, unused], 1.0, norm)
    torch.testing.assert_close(torch.cat([a.grad, b.grad]), torch.tensor([0.6, 0, 0, 0.8]), rtol=1e-5, atol=0)
    assert unused.grad is None
    assert gradient_norm([unused]) == 0.0


# --- master weights --------------------------------------------------------------------------------------------------


def test_in_fp32_the_masters_are_the_parameters():
    model = Model()
    masters = MasterWeights(model, torch.float32)
    for name, parameter in model.named_parameters():
        assert masters.by_name[name] is parameter


def test_in_bf16_the_masters_accumulate_and_learn_in_fp32():
    torch.manual_seed(1)
    model = Model()
    select_trainable(model, ModelSection(freeze=("embed*",)), MoESection())
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    masters = MasterWeights(model, torch.bfloat16)
    proj = model.layers["0"].proj
    assert proj.weight.dtype == torch.bfloat16
    assert model.layers["0"].mlp.gate.weight.dtype == torch.float32
    assert model.layers["0"].attention_sink_bias.dtype == torch.float32
    assert all(torch.equal(masters.by_name[name], start[name]) for name in start)
    assert "embed.weight" not in masters.trainable

    inputs = [torch.randn(3, 8, dtype=torch.bfloat16) for _ in range(4)]
    expected = torch.zeros(8, 8)
    for x in inputs:
        proj(x).sum().backward()
        expected += (torch.ones(3, 8, dtype=torch.bfloat16).T @ x).float()
    master = masters.by_name["layers.0.proj.weight"]
    assert proj.weight.grad is None and master.grad.dtype == torch.float32
    assert torch.equal(master.grad, expected)

    # steps far below the resolution of bf16 are not lost
    optimizer = torch.optim.SGD(masters.trainable.values(), lr=1e-6)
    for _ in range(3):
        optimizer.step()
    masters.publish()
    torch.testing.assert_close(master.detach(), start["layers.0.proj.weight"] - 3e-6 * expected, rtol=0, atol=1e-7)
    assert not torch.equal(master.detach(), start["layers.0.proj.weight"])
    assert torch.equal(proj.weight, master.bfloat16())

    with masters.in_model():
        assert proj.weight.dtype == torch.float32 and torch.equal(proj.weight, master)
    assert proj.weight.dtype == torch.bfloat16
    masters.zero_grad()
    assert master.grad is None
