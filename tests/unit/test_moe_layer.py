import pytest
import torch
from moe_oracle import make_config, slow_moe
from torch import nn
from torch.utils.checkpoint import checkpoint

from automimo.moe import (
    Documents,
    Gate,
    MoE,
    attach_aux_loss,
    expert_load,
    load_metrics,
    moe_layers,
    reset_expert_load,
    router_frozen_contexts,
    set_aux_loss_scale,
    update_router_biases,
)


def make_moe(backend="torch_mm", **changes) -> MoE:
    torch.manual_seed(0)
    layer = MoE(make_config(**changes), backend)
    layer.reset_parameters(0.3)
    if layer.gate.e_score_correction_bias is not None:
        layer.gate.e_score_correction_bias.normal_(0.0, 0.2)
    return layer


@pytest.mark.parametrize("backend", ["torch_mm", "torch"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"n_expert_groups": 4, "n_limited_groups": 2, "n_activated_experts": 3, "route_scale": 2.5},
        {"score_func": "softmax", "norm_topk_prob": False},
        {"score_func": "softmax_with_bias", "n_activated_experts": 8},
        {"score_func": "sigmoid", "n_expert_groups": 2, "n_activated_experts": 1, "norm_topk_prob": False},
    ],
)
def test_layer_equals_the_loop_with_every_gradient(backend, changes):
    layer = make_moe(backend, **changes)
    x = torch.randn(24, 16, requires_grad=True)
    out_grad = torch.randn(24, 16)
    rows = [0, 1, 2, 5, 6, 11, 12, 13, 20, 23]
    y, _ = layer(x, token_indices=torch.tensor(rows))
    y.backward(out_grad)

    tensors = [x, layer.gate.weight, layer.experts.gate_and_up_projs, layer.experts.down_projs]
    copies = [t.detach().double().requires_grad_() for t in tensors]
    bias = layer.gate.e_score_correction_bias
    want = slow_moe(copies[0], copies[1], bias, copies[2], copies[3], layer.config, rows)
    want.backward(out_grad.double())
    assert (y.double() - want).norm() < 2e-6 * want.norm()
    for ours, theirs in zip(tensors, copies, strict=True):
        assert (ours.grad.double() - theirs.grad).norm() < 5e-6 * theirs.grad.norm()


def test_padding_goes_nowhere_and_counts_nowhere():
    layer = make_moe(aux_loss_coeff=0.1)
    x = torch.randn(20, 16)
    rows = torch.tensor([0, 1, 2, 7, 8, 9, 15])
    documents = torch.tensor([0] * 5 + [1] * 10 + [2] * 5)
    noisy = x.clone()
    padding = torch.ones(20, dtype=torch.bool)
    padding[rows] = False
    noisy[padding] = torch.nan
    noisy.requires_grad_()
    y, stats = layer(noisy, token_indices=rows, documents=Documents(documents, 3))
    alone, stats_alone = layer(x[rows], documents=Documents(documents[rows], 3))
    assert torch.equal(y[rows], alone)
    assert torch.equal(y[padding], torch.zeros(13, 16))
    assert stats.load_E.sum() == 7 * 2
    assert torch.equal(stats.load_E, stats_alone.load_E)
    assert torch.equal(stats.aux_loss, stats_alone.aux_loss)
    y.sum().backward()
    assert torch.equal(noisy.grad[padding], torch.zeros(13, 16))
    assert torch.isfinite(noisy.grad).all()


@pytest.mark.parametrize("backend", ["torch_mm", "torch"])
def test_no_real_token_at_all(backend):
    layer = make_moe(backend, aux_loss_coeff=0.1)
    x = torch.randn(3, 16, requires_grad=True)
    none = torch.zeros(0, dtype=torch.int64)
    y, stats = layer(x, token_indices=none, documents=Documents(torch.zeros(3, dtype=torch.int64), 1))
    attach_aux_loss(y, stats.aux_loss, 1.0).sum().backward()
    assert torch.equal(y, torch.zeros(3, 16))
    assert stats.load_E.sum() == 0
    for tensor in (x, *layer.parameters()):
        assert torch.equal(tensor.grad, torch.zeros_like(tensor))


def test_batched_input_is_one_stream():
    layer = make_moe()
    x = torch.randn(2, 7, 16)
    y, _ = layer(x)
    assert torch.equal(y, layer(x.flatten(0, 1))[0].view(2, 7, 16))


def test_aux_loss_is_attached_without_showing():
    layer = make_moe(aux_loss_coeff=0.5)
    x = torch.randn(12, 16)
    y, stats = layer(x)
    torch.autograd.backward(3.0 * y.sum() + 0.125 * stats.aux_loss)
    want = [p.grad for p in layer.parameters()]
    layer.zero_grad()
    y, stats = layer(x)
    hidden = attach_aux_loss(y, stats.aux_loss, 0.125)
    assert torch.equal(hidden, y)
    (3.0 * hidden.sum()).backward()
    for parameter, grad in zip(layer.parameters(), want, strict=True):
        torch.testing.assert_close(parameter.grad, grad)
    assert attach_aux_loss(y, None, 1.0) is y


def test_aux_gradient_is_the_same_for_one_batch_and_for_micro_batches():
    layer = make_moe(aux_loss_coeff=0.5).double()
    layer.experts.requires_grad_(False)
    x = torch.randn(30, 16, dtype=torch.float64)
    documents = torch.tensor([0] * 4 + [1] * 16 + [2] * 10)
    set_aux_loss_scale(layer, 1 / 30)
    grads = []
    for cuts in ([(0, 30)], [(0, 4), (4, 20), (20, 30)], [(0, 20), (20, 30)]):
        layer.zero_grad()
        for a, b in cuts:
            y, stats = layer(x[a:b], documents=Documents(documents[a:b], 3))
            (attach_aux_loss(y, stats.aux_loss, layer.aux_loss_scale).square().sum() / 30).backward()
        grads.append(layer.gate.weight.grad.clone())
    torch.testing.assert_close(grads[1], grads[0])
    torch.testing.assert_close(grads[2], grads[0])


class Stack(nn.Module):
    def __init__(self, **changes):
        super().__init__()
        self.dense = nn.Linear(16, 16)
        self.blocks = nn.ModuleDict({"1": make_moe(**changes), "2": make_moe(**changes)})


def test_hooks_reach_every_layer():
    model = Stack(gate_bias_update_factor=0.01)
    assert list(moe_layers(model)) == ["blocks.1", "blocks.2"]
    set_aux_loss_scale(model, 0.25)
    assert [layer.aux_loss_scale for layer in moe_layers(model).values()] == [0.25, 0.25]
    before = [layer.gate.e_score_correction_bias.clone() for layer in moe_layers(model).values()]
    for factor, layer in enumerate(moe_layers(model).values(), start=1):
        layer.gate.record(layer(torch.randn(10 * factor, 16))[1])
    assert expert_load(model).sum(1).tolist() == [20, 40]
    update_router_biases(model)
    for layer, bias in zip(moe_layers(model).values(), before, strict=True):
        assert not torch.equal(layer.gate.e_score_correction_bias, bias)
    reset_expert_load(model)
    assert expert_load(model).tolist() == [[0] * 8] * 2
    assert expert_load(nn.Linear(2, 2)).shape == (0, 0)
    update_router_biases(Stack())  # no step configured: nothing to do, no error


def test_load_metrics():
    assert load_metrics(torch.tensor([2, 2, 2, 2])) == {
        "load_cv": 0.0,
        "load_max_over_mean": 1.0,
        "dead_experts": 0.0,
        "dead_share": 0.0,
    }
    # [8, 0, 0, 0]: mean 2, deviations 6, -2, -2, -2, standard deviation sqrt(48 / 4)
    metrics = load_metrics(torch.tensor([[8, 0, 0, 0], [2, 2, 2, 2], [0, 0, 0, 0]]))
    assert metrics["load_cv"] == pytest.approx((12**0.5 / 2 + 0) / 2)
    assert metrics["load_max_over_mean"] == 4.0
    assert metrics["dead_experts"] == 3.0
    assert metrics["dead_share"] == 3 / 8
    assert load_metrics(torch.zeros(4, dtype=torch.int64)) == {}
    assert load_metrics(torch.zeros(0, 0, dtype=torch.int64)) == {}


def test_meta_construction_cast_and_materialisation():
    with torch.device("meta"):
        layer = MoE(make_config(dtype="bfloat16", gate_bias_update_factor=0.1))
    assert all(tensor.is_meta for tensor in (*layer.parameters(), *layer.buffers()))
    layer.to(torch.float16)
    layer.to_empty(device="cpu")
    assert layer.gate.weight.dtype == layer.gate.e_score_correction_bias.dtype == torch.float32
    assert layer.experts.down_projs.dtype == torch.float16
    assert torch.equal(layer.gate.expert_load, torch.zeros(8, dtype=torch.int64))
    layer.reset_parameters(0.02, torch.Generator().manual_seed(3))
    again = MoE(make_config(dtype="float16", gate_bias_update_factor=0.1))
    again.reset_parameters(0.02, torch.Generator().manual_seed(3))
    for name, tensor in layer.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    assert layer.experts.down_projs.float().std().item() == pytest.approx(0.02, rel=0.1)
    assert list(layer.state_dict()) == [
        "gate.weight",
        "gate.e_score_correction_bias",
        "experts.gate_and_up_projs",
        "experts.down_projs",
    ]


def test_a_cast_model_routes_as_before():
    layer = make_moe()
    x = torch.randn(300, 16).bfloat16()
    before = layer.gate(x)
    layer.to(torch.bfloat16)
    assert torch.equal(layer.gate(x).indices_TK, before.indices_TK)
    assert torch.equal(layer.gate(x).weights_TK, before.weights_TK)
    y, _ = layer(x)
    assert y.dtype == torch.bfloat16


class NoisyGate(Gate):
    """A router that is never the same twice, as if its matmul were nondeterministic, only worse."""

    def forward(self, x_TD, documents=None, context=None):
        return super().forward(x_TD + torch.randn_like(x_TD), documents, context)


def _run_checkpointed(layer, x, context_fn):
    seen = []
    handle = layer.experts.register_forward_pre_hook(lambda _module, args: seen.append(args[2].clone()))
    options = {"use_reentrant": False, "preserve_rng_state": False}
    if context_fn is not None:
        options["context_fn"] = context_fn
    y, stats = checkpoint(layer, x, **options)
    layer.gate.record(stats)
    y.square().sum().backward()
    handle.remove()
    return seen


def test_recompute_keeps_the_choice_of_a_noisy_router():
    for groups in (1, 4):
        layer = make_moe(n_expert_groups=groups, n_limited_groups=max(1, groups // 2))
        noisy = NoisyGate(layer.config)
        noisy.load_state_dict(layer.gate.state_dict())
        layer.gate = noisy
        x = torch.randn(64, 16, requires_grad=True)
        first, second = _run_checkpointed(layer, x, router_frozen_contexts)
        assert torch.equal(first, second)
        assert layer.gate.expert_load.sum() == 64 * 2  # counted once
        free_first, free_second = _run_checkpointed(layer, x, None)
        assert not torch.equal(free_first, free_second)  # the noise would have changed it


def test_checkpointing_changes_neither_loss_nor_gradients_nor_counts():
    results = []
    for use_checkpoint in (False, True):
        layer = make_moe(aux_loss_coeff=0.1)
        x = torch.randn(40, 16, generator=torch.Generator().manual_seed(5)).requires_grad_()
        if use_checkpoint:
            y, stats = checkpoint(layer, x, use_reentrant=False, context_fn=router_frozen_contexts)
        else:
            y, stats = layer(x)
        layer.gate.record(stats)
        attach_aux_loss(y, stats.aux_loss, 0.5).square().sum().backward()
        results.append([y.detach(), x.grad, layer.gate.expert_load, *(p.grad for p in layer.parameters())])
    for plain, recomputed in zip(*results, strict=True):
        assert torch.equal(plain, recomputed)
