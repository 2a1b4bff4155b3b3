"""What stays in fp32, whatever the model is cast to; initial weights; meta construction; repeatability."""

import copy
from collections.abc import Callable
from math import sqrt
from typing import Any

import pytest
import torch
from tiny_text import VOCAB, gradients, relative, tiny_config, tiny_model
from torch import Tensor

from automimo.backend import BackendConfig
from automimo.errors import ConfigError
from automimo.mimo_v2_flash.layers import MiMoV2FlashRotaryEmbedding, MiMoV2RMSNorm, rotary_width
from automimo.mimo_v2_flash.model import MiMoV2FlashForCausalLM
from automimo.moe import moe_layers

PROTECTED = ("mlp.gate.weight", "e_score_correction_bias", "attention_sink_bias")
CASTS: dict[str, tuple[torch.dtype, Callable[[MiMoV2FlashForCausalLM], Any]]] = {
    "to(bfloat16)": (torch.bfloat16, lambda model: model.to(torch.bfloat16)),
    "bfloat16()": (torch.bfloat16, lambda model: model.bfloat16()),
    "half()": (torch.float16, lambda model: model.half()),
    "to(dtype=, device=)": (torch.bfloat16, lambda model: model.to(device="cpu", dtype=torch.bfloat16)),
    "twice": (torch.float16, lambda model: model.to(torch.bfloat16).half()),
    "parts": (torch.bfloat16, lambda model: [part.to(torch.bfloat16) for part in (model.model, model.lm_head)]),
}


@pytest.mark.parametrize("name", CASTS)
def test_router_and_sinks_survive_casts_bit_for_bit(name: str) -> None:
    dtype, cast = CASTS[name]
    model = tiny_model()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    cast(model)
    protected = 0
    for key, tensor in model.state_dict().items():
        if key.endswith(PROTECTED):
            protected += 1
            assert tensor.dtype == torch.float32, key
            assert torch.equal(tensor, before[key]), key
        else:
            assert tensor.dtype == dtype, key
    assert protected == 2 * 3 + 4  # three routers with a bias, four sinks
    assert {p.dtype for p in model.parameters()} == {torch.float32, dtype}


def test_gradients_of_protected_parameters_survive_too() -> None:
    model = tiny_model()
    model(torch.arange(8).unsqueeze(0), targets=torch.arange(8).unsqueeze(0)).loss.backward()
    before = gradients(model)
    model.to(torch.bfloat16)
    for name, gradient in gradients(model).items():
        if name.endswith(PROTECTED):
            assert torch.equal(gradient, before[name]), name


@pytest.mark.parametrize("device", ["meta"])
def test_construction_on_meta_and_materialisation(device: str) -> None:
    with torch.device(device):
        model = MiMoV2FlashForCausalLM.from_config(tiny_config(torch_dtype="bfloat16"))
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"meta"}
    model.to_empty(device="cpu")
    for key, tensor in model.state_dict().items():
        assert tensor.dtype == (torch.float32 if key.endswith(PROTECTED) else torch.bfloat16), key
    # Whatever was in memory: after initialisation nothing of it is left.
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(7 if tensor.dtype == torch.int64 else float("nan"))
    torch.manual_seed(5)
    model.initialize_weights(dtype=torch.float32)
    assert all(bool(t.isfinite().all()) for t in (*model.parameters(), *model.buffers()))
    assert all(int(layer.gate.expert_load.sum()) == 0 for layer in moe_layers(model).values())

    direct = MiMoV2FlashForCausalLM(tiny_config())
    torch.manual_seed(5)
    direct.initialize_weights(dtype=torch.float32)
    for key, tensor in direct.state_dict().items():
        assert torch.equal(model.state_dict()[key], tensor), key
    ids = torch.arange(20).unsqueeze(0)
    assert torch.equal(model(ids).logits, direct(ids).logits)


def test_the_config_decides_the_dtype() -> None:
    for name in ("float32", "bfloat16", "float16"):
        model = MiMoV2FlashForCausalLM(tiny_config(torch_dtype=name))
        for key, tensor in model.state_dict().items():
            assert tensor.dtype == (torch.float32 if key.endswith(PROTECTED) else getattr(torch, name)), key


# -- rotary -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("theta", [1e4, 5e6, 1e7])
@pytest.mark.parametrize("make", ["plain", "cast", "meta"])
def test_rotary_tables_against_fp64(theta: float, make: str) -> None:
    """At position 100,000 fp32 leaves an angle error of 100000 * 2^-24 * a few = 0.01; bf16 would leave hundreds."""
    if make == "meta":
        with torch.device("meta"):
            rotary = MiMoV2FlashRotaryEmbedding(theta, 192, 0.334)
        rotary.to_empty(device="cpu")
    else:
        rotary = MiMoV2FlashRotaryEmbedding(theta, 192, 0.334)
    if make == "cast":
        rotary.to(torch.bfloat16)
    positions = torch.tensor([0, 1, 127, 4095, 100_000, 1_000_000])
    cos, sin = rotary(torch.zeros(1), positions)
    assert cos.shape == sin.shape == (6, 64)
    assert cos.dtype == torch.float32
    frequency = theta ** (-2.0 * torch.arange(32, dtype=torch.float64) / 64)
    angle = positions.double().unsqueeze(1) * torch.cat((frequency, frequency))
    bound = (positions.double() * 2**-24 * 4 + 1e-6).unsqueeze(1)
    for found, exact in ((cos, angle.cos()), (sin, angle.sin())):
        assert bool(((found.double() - exact).abs() <= bound).all())


def test_rotary_dtype_and_autocast() -> None:
    rotary = MiMoV2FlashRotaryEmbedding(1e4, 192, 0.334)
    positions = torch.arange(100_000, 100_004)
    exact, _ = rotary(torch.zeros(1), positions)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside, _ = rotary(torch.zeros(1), positions)
    assert torch.equal(exact, inside)
    narrow, _ = rotary(torch.zeros(1, dtype=torch.bfloat16), positions)
    assert torch.equal(narrow, exact.to(torch.bfloat16))
    batched, _ = rotary(torch.zeros(1), positions.view(2, 2))
    assert batched.shape == (2, 2, 64)


@pytest.mark.parametrize(
    ("width", "factor", "expected"), [(192, 0.334, 64), (48, 0.334, 16), (10, 0.5, 4), (7, 1.0, 6), (192, 1.0, 192)]
)
def test_rotary_width(width: int, factor: float, expected: int) -> None:
    assert rotary_width(width, factor) == expected


@pytest.mark.parametrize(("width", "factor"), [(192, 0.0), (4, 0.3), (8, -0.5)])
def test_rotary_width_too_small(width: int, factor: float) -> None:
    with pytest.raises(ConfigError, match="Invalid rotary_dim"):
        MiMoV2FlashRotaryEmbedding(1e4, width, factor)


def test_the_two_layer_kinds_have_their_own_theta() -> None:
    model = tiny_model(tiny_config(rope_theta=5e6, swa_rope_theta=1e4)).model
    assert (model.rotary_emb.rope_theta, model.swa_rotary_emb.rope_theta) == (5e6, 1e4)
    base = tiny_model().eval()
    ids = torch.arange(30).unsqueeze(0)
    for key in ("rope_theta", "swa_rope_theta"):
        other = tiny_model(tiny_config(**{key: 100.0})).eval()
        with torch.no_grad():
            assert relative(other(ids).logits, base(ids).logits) > 1e-4


# -- norm -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rms_norm_casts_before_it_multiplies(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    norm = MiMoV2RMSNorm(64, 1e-5, dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(64, generator=generator))
    x = (5 * torch.randn(9, 64, generator=generator)).to(dtype)
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
    expected = norm.weight * normed.to(dtype)
    found = norm(x)
    assert found.dtype == dtype
    if dtype == torch.float32:
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    else:
        assert torch.equal(found, expected)
    fused = MiMoV2RMSNorm(64, 1e-5, dtype, fused=True)
    fused.load_state_dict(norm.state_dict())
    torch.testing.assert_close(fused(x), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    norm.reset_parameters()
    assert torch.equal(norm.weight, torch.ones(64, dtype=dtype))


def test_the_norm_backends_agree_in_fp32() -> None:
    ids = torch.arange(30).unsqueeze(0)
    models = [MiMoV2FlashForCausalLM(tiny_config(), backend=BackendConfig(rms_norm=n)) for n in ("torch", "torch_fp32")]
    state = tiny_model().state_dict()
    with torch.no_grad():
        a, b = (model.eval() for model in models)
        a.load_state_dict(state)
        b.load_state_dict(state)
        assert relative(a(ids).logits, b(ids).logits) < 1e-6


# -- bf16 and autocast ------------------------------------------------------------------------------------------------


def divergence(found: Tensor, exact: Tensor) -> float:
    """Mean KL of the next-token distributions."""
    found, exact = found.float().log_softmax(-1), exact.float().log_softmax(-1)
    return float((exact.exp() * (exact - found)).sum(-1).mean())


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_bf16_forward_and_backward(attn: str) -> None:
    exact, narrow = tiny_model(attn=attn), tiny_model(attn=attn, dtype=torch.bfloat16)
    ids = torch.randint(0, VOCAB, (2, 30), generator=torch.Generator().manual_seed(2))
    output = narrow(ids).logits
    assert output.dtype == torch.bfloat16
    # Logits here have a spread of 1; bf16 rounds to 2^-8, and now and then a token changes an expert.
    assert divergence(output.detach(), exact(ids).logits.detach()) < 2e-2
    loss = narrow(ids, targets=ids).loss
    assert loss.dtype == torch.float32
    loss.backward()
    for name, gradient in gradients(narrow).items():
        assert bool(gradient.isfinite().all()), name
        assert gradient.dtype == (torch.float32 if name.endswith(PROTECTED) else torch.bfloat16), name


def test_autocast_runs_in_bf16_and_keeps_the_router_in_fp32() -> None:
    model = tiny_model()
    ids = torch.randint(0, VOCAB, (2, 30), generator=torch.Generator().manual_seed(2))
    exact = model(ids).logits.detach()
    seen = []
    gates = [layer.gate for layer in moe_layers(model).values()]
    hooks = [gate.register_forward_hook(lambda _m, _i, out: seen.append(out.weights_TK.dtype)) for gate in gates]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(ids).logits
        loss = model(ids, targets=ids).loss
    for hook in hooks:
        hook.remove()
    assert set(seen) == {torch.float32}
    assert output.dtype == torch.bfloat16
    assert 0 < divergence(output.detach(), exact) < 2e-2
    loss.backward()
    assert {g.dtype for g in gradients(model).values()} == {torch.float32}
    assert all(bool(g.isfinite().all()) for g in gradients(model).values())


def test_double_precision_works_for_checks() -> None:
    """In fp64 the two attention backends agree to fp64, so nothing on the way falls back to fp32."""
    models = [tiny_model(attn=attn).double() for attn in ("sdpa", "eager")]
    ids = torch.randint(0, VOCAB, (2, 30))
    for model in models:
        model(ids, targets=ids).loss.backward()
    a, b = (gradients(model) for model in models)
    assert {gradient.dtype for gradient in a.values()} == {torch.float64}
    worst = max(relative(a[name], b[name]) for name in a)
    # The rotary tables are fp32 by design, but the same in both; the head sums its loss in fp64.
    assert worst < 1e-12


# -- initial weights --------------------------------------------------------------------------------------------------


def test_statistics_of_initial_weights() -> None:
    config = tiny_config(hidden_size=128, vocab_size=2000, moe_intermediate_size=64, attention_bias=True)
    model = MiMoV2FlashForCausalLM(config)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(3)
    torch.manual_seed(0)
    model.initialize_weights(dtype=torch.float32)
    for name, tensor in model.state_dict().items():
        if "norm" in name:
            assert torch.equal(tensor, torch.ones_like(tensor)), name
        elif name.endswith((".bias", "sink_bias", "correction_bias")):
            assert torch.equal(tensor, torch.zeros_like(tensor)), name
        else:
            head = 1 / sqrt(128)
            # A normal cut at three standard deviations has 0.9866 of its spread.
            std = {"model.embed_tokens.weight": 1.0, "lm_head.weight": 0.9866 * head}.get(name, 0.02)
            count = tensor.numel()
            assert float(tensor.std()) == pytest.approx(std, rel=5 / sqrt(2 * count) + 1e-3), name
            assert abs(float(tensor.mean())) < 5 * std / sqrt(count), name
            if name == "lm_head.weight":
                assert float(tensor.abs().max()) <= 3 * head * (1 + 1e-6)
    logits = model(torch.randint(0, 2000, (1, 200))).logits
    assert float(logits.detach().std()) == pytest.approx(1.0, abs=0.05)


def test_initialisation_casts_and_leaves_requires_grad_alone() -> None:
    model = MiMoV2FlashForCausalLM(tiny_config())
    sinks = [p for name, p in model.named_parameters() if "sink" in name]
    assert len(sinks) == 4
    assert not any(p.requires_grad for p in sinks)
    sinks[0].requires_grad_(True)
    model.initialize_weights()
    assert [p.requires_grad for name, p in model.named_parameters() if "sink" in name] == [True, False, False, False]
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert model.model.layers["1"].mlp.gate.weight.dtype == torch.float32


def test_the_same_seed_gives_the_same_weights_in_every_dtype() -> None:
    states = []
    for dtype in (torch.float32, torch.bfloat16):
        model = MiMoV2FlashForCausalLM(tiny_config(torch_dtype=str(dtype).removeprefix("torch.")))
        torch.manual_seed(3)
        model.initialize_weights(dtype=dtype)
        states.append(model.state_dict())
    for name, tensor in states[0].items():
        assert torch.equal(tensor.to(states[1][name].dtype), states[1][name]), name


# -- repeatability ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_runs_on_two_threads_are_equal_bit_for_bit(dtype: torch.dtype) -> None:
    threads = torch.get_num_threads()
    config = tiny_config(vocab_size=501)
    first = tiny_model(config, dtype=dtype)
    second = copy.deepcopy(first)
    ids = torch.randint(0, 501, (400,), generator=torch.Generator().manual_seed(6))
    cu = torch.tensor([0, 3, 200, 201, 400])
    torch.set_num_threads(2)
    try:
        results = []
        for model in (first, second):
            loss = model(ids, cu_seqlens=cu, targets=ids.roll(-1), loss_chunk=64).loss
            loss.backward()
            results.append((loss.detach(), gradients(model)))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0][0], results[1][0])
    for name, gradient in results[0][1].items():
        assert torch.equal(gradient, results[1][1][name]), name
