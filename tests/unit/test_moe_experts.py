import pytest
import torch
from moe_oracle import make_config
from torch.nn import functional as F

from automimo.errors import ConfigError
from automimo.moe import GroupedExperts, token_order
from automimo.moe.experts import expert_mlp
from automimo.moe.token_order import combine, dispatch, sort_by_expert

BACKENDS = ["torch_mm", "torch"]


def make_experts(backend="torch_mm", **changes) -> GroupedExperts:
    torch.manual_seed(0)
    module = GroupedExperts(make_config(**changes), backend)
    module.reset_parameters(0.3)
    return module


def slow_experts(x, weights, indices, gate_up, down):
    rows = []
    inter = down.shape[1]
    for t in range(x.shape[0]):
        row = torch.zeros_like(x[t])
        for w, e in zip(weights[t], indices[t].tolist(), strict=True):
            hidden = x[t] @ gate_up[e]
            row = row + w * ((F.silu(hidden[:inter]) * hidden[inter:]) @ down[e])
        rows.append(row)
    return torch.stack(rows)


def random_routing(tokens, experts, k):
    scores = torch.rand(tokens, experts)
    weights, indices = scores.topk(k)
    return weights / weights.sum(-1, keepdim=True), indices


def gradients(module, x, weights, indices, out_grad):
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    for parameter in module.parameters():
        parameter.grad = None
    y = module(x, weights, indices)
    y.backward(out_grad)
    return {
        "y": y.detach(),
        "x": x.grad,
        "weights": weights.grad,
        "gate_up": module.gate_and_up_projs.grad,
        "down": module.down_projs.grad,
    }


def oracle_gradients(module, x, weights, indices, out_grad):
    leaves = [t.detach().double().requires_grad_() for t in (x, weights, module.gate_and_up_projs, module.down_projs)]
    x, weights, gate_up, down = leaves
    y = slow_experts(x, weights, indices, gate_up, down)
    y.backward(out_grad.double())
    return dict(zip(("y", "x", "weights", "gate_up", "down"), (y.detach(), *(t.grad for t in leaves)), strict=True))


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("tokens", "experts", "k", "dim", "inter"),
    [(50, 8, 2, 16, 8), (1, 8, 3, 16, 8), (33, 5, 5, 20, 12), (64, 64, 4, 8, 4), (10, 4, 1, 7, 5), (3, 40, 2, 16, 3)],
)
def test_experts_equal_the_loop(backend, tokens, experts, k, dim, inter):
    module = make_experts(backend, n_routed_experts=experts, n_activated_experts=k, dim=dim, moe_inter_dim=inter)
    x, out_grad = torch.randn(2, tokens, dim)
    weights, indices = random_routing(tokens, experts, k)
    got = gradients(module, x, weights, indices, out_grad)
    want = oracle_gradients(module, x, weights, indices, out_grad)
    for name, value in want.items():
        assert relative(got[name], value) < 2e-6, name


def test_float64_takes_the_loop_and_is_exact():
    module = make_experts().double()
    x, out_grad = torch.randn(2, 30, 16, dtype=torch.float64)
    weights, indices = random_routing(30, 8, 2)
    want = oracle_gradients(module, x, weights, indices, out_grad)
    got = gradients(module, x, weights.double(), indices, out_grad)
    for name, value in want.items():
        assert relative(got[name], value) < 1e-13, name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_grouped_equals_loop(dtype):
    results = []
    for backend in BACKENDS:
        module = make_experts(backend, dtype=dtype, n_routed_experts=16, n_activated_experts=4)
        x, out_grad = torch.randn(2, 100, 16, generator=torch.Generator().manual_seed(1)).to(getattr(torch, dtype))
        torch.manual_seed(2)
        weights, indices = random_routing(100, 12, 4)  # experts 12 to 15 stay empty
        results.append(gradients(module, x, weights, indices, out_grad))
    for name, value in results[0].items():
        # bf16: both round each matmul once, to within 2^-8, in the mean 2^-9
        assert relative(value, results[1][name]) < (1e-6 if dtype == "float32" else 2**-9), name
        assert value.dtype == results[1][name].dtype


def test_bf16_is_within_its_rounding_of_the_oracle():
    module = make_experts(dtype="bfloat16", n_routed_experts=16, n_activated_experts=4)
    x, out_grad = torch.randn(2, 100, 16).bfloat16()
    weights, indices = random_routing(100, 16, 4)
    got = gradients(module, x, weights, indices, out_grad)
    assert got["y"].dtype == got["x"].dtype == torch.bfloat16
    assert got["weights"].dtype == torch.float32
    for name, value in oracle_gradients(module, x, weights, indices, out_grad).items():
        assert relative(got[name], value) < 4 * 2**-8, name  # a handful of bf16 roundings in a row


def assert_rounded_once(got, exact):
    """Half a step of bf16 (at most 2^-8 of the value), plus what eight fp32 terms of size 1 to 10 leave behind."""
    assert got.dtype == torch.bfloat16
    assert ((got.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-5).all()


def test_sums_are_in_fp32_and_rounded_once():
    _, indices = random_routing(200, 8, 8)
    weights = torch.rand(200, 8)
    order = sort_by_expert(indices, 8)
    rows = torch.randn(1600, 24).bfloat16()
    exact = torch.stack([(weights[t].double() @ rows[order.row_TK[t]].double()) for t in range(200)])
    assert_rounded_once(combine(rows, weights, order), exact)
    x = torch.randn(200, 24).bfloat16().requires_grad_()
    grad = torch.randn(1600, 24).bfloat16()
    dispatch(x, order).backward(grad)
    assert_rounded_once(x.grad, torch.stack([grad[order.row_TK[t]].double().sum(0) for t in range(200)]))
    # The probe is sharp: adding the same rows up in bf16 fails it.
    narrow = torch.zeros(200, 24).bfloat16()
    for k in range(8):
        narrow += grad[order.row_TK[:, k]]
    with pytest.raises(AssertionError):
        assert_rounded_once(narrow, torch.stack([grad[order.row_TK[t]].double().sum(0) for t in range(200)]))


def test_blocks_of_tokens_do_not_show(monkeypatch):
    module = make_experts()
    x, out_grad = torch.randn(2, 50, 16)
    weights, indices = random_routing(50, 8, 2)
    whole = gradients(module, x, weights, indices, out_grad)
    monkeypatch.setattr(token_order, "_BLOCK", 7)
    for name, value in gradients(module, x, weights, indices, out_grad).items():
        # every token's sums are its own; only the row-wise dot may be split over other vector lanes
        torch.testing.assert_close(value, whole[name], rtol=1e-6, atol=1e-7)


def test_order_is_stable_and_its_inverse_fits():
    indices = torch.randint(0, 5, (40, 3))
    order = sort_by_expert(indices, 7)
    flat = indices.flatten()
    pairs = sorted(range(120), key=lambda p: (int(flat[p]), p))
    assert order.token_N.tolist() == [p // 3 for p in pairs]
    assert [pairs[r] for r in order.row_TK.flatten().tolist()] == list(range(120))
    assert order.counts_E.tolist() == [int((flat == e).sum()) for e in range(7)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_empty_experts_get_zero_gradients(backend, tokens):
    module = make_experts(backend, n_activated_experts=1)
    x, out_grad = torch.randn(2, tokens, 16)
    got = gradients(module, x, torch.ones(tokens, 1), torch.full((tokens, 1), 5), out_grad)  # all tokens to one expert
    assert got["y"].shape == got["x"].shape == (tokens, 16)
    for name in ("gate_up", "down"):
        others = got[name][[0, 1, 2, 3, 4, 6, 7]]
        assert torch.equal(others, torch.zeros_like(others))
        assert torch.isfinite(got[name]).all()
        assert (got[name][5].abs().sum() > 0) == (tokens > 0)


def test_frozen_experts_pass_gradients_on():
    module = make_experts().requires_grad_(False)
    x = torch.randn(9, 16, requires_grad=True)
    weights, indices = random_routing(9, 8, 2)
    module(x, weights, indices).square().sum().backward()
    assert module.down_projs.grad is None
    assert x.grad.abs().sum() > 0


def test_expert_mlp_alone_is_a_seam_for_local_experts():
    # As under expert parallelism: half of the experts on each side, rows exchanged in between.
    module = make_experts()
    x = torch.randn(30, 16)
    weights, indices = random_routing(30, 8, 2)
    order = sort_by_expert(indices, 8)
    rows, split = dispatch(x, order), int(order.counts_E[:4].sum())
    gate_up, down = module.gate_and_up_projs, module.down_projs
    low = expert_mlp(rows[:split], order.counts_E[:4], gate_up[:4], down[:4], "torch_mm")
    high = expert_mlp(rows[split:], order.counts_E[4:], gate_up[4:], down[4:], "torch_mm")
    torch.testing.assert_close(combine(torch.cat([low, high]), weights, order), module(x, weights, indices))


def test_autocast_runs_the_experts_in_bf16():
    module = make_experts()
    x, out_grad = torch.randn(2, 40, 16)
    weights, indices = random_routing(40, 8, 2)
    with torch.autocast("cpu", torch.bfloat16):
        got = gradients(module, x, weights, indices, out_grad)
    want = gradients(make_experts(dtype="bfloat16"), x.bfloat16(), weights, indices, out_grad.bfloat16())
    assert all(got[name].dtype == torch.float32 for name in got)
    for name, value in want.items():
        assert relative(got[name], value) < 2**-8, name


def test_unknown_backend():
    with pytest.raises(ConfigError, match=r"te.*torch, torch_mm"):
        GroupedExperts(make_config(), "te")


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_threads_give_the_same_bits_every_time(backend):
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        module = make_experts(backend, dim=64, moe_inter_dim=32)
        x, out_grad = torch.randn(2, 1000, 64)
        weights, indices = random_routing(1000, 8, 2)
        first = gradients(module, x, weights, indices, out_grad)
        for _ in range(2):
            for name, value in gradients(module, x, weights, indices, out_grad).items():
                assert torch.equal(value, first[name]), name
    finally:
        torch.set_num_threads(threads)
