"""Our text model against transformers' MiMoV2FlashForCausalLM: logits and every gradient, on random tiny configs."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from automimo.backend import BackendConfig
from automimo.mimo_v2_flash.config import MiMoV2FlashConfig
from automimo.mimo_v2_flash.model import MiMoV2FlashForCausalLM
from tests.parity.oracle import native_twin, to_native

SMALL: dict[str, Any] = {
    "vocab_size": 89,
    "hidden_size": 48,
    "intermediate_size": 80,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "v_head_dim": 16,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 24,
    "swa_v_head_dim": 16,
    "sliding_window": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "torch_dtype": "float32",
}
# int(24 * 0.334) = 8 is even: the two stacks round odd rotary widths differently.
CASES: dict[str, dict[str, Any]] = {
    "published pattern": {"num_hidden_layers": 7},
    "all full": {"hybrid_layer_pattern": [0, 0, 0, 0]},
    "all sliding": {"hybrid_layer_pattern": [1, 1, 1, 1]},
    "sliding first": {"hybrid_layer_pattern": [1, 0, 1, 0]},
    "all MoE": {"moe_layer_freq": [1, 1, 1, 1]},
    "all dense": {"moe_layer_freq": [0, 0, 0, 0]},
    "group routing": {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 3},
    "no normalisation, scaled": {"norm_topk_prob": False, "routed_scaling_factor": 2.5},
    "window longer than the input": {"sliding_window": 400},
    "window one": {"sliding_window": 1},
    "window equal to the input": {"sliding_window": 96},
    "many kv heads, biases": {"num_key_value_heads": 2, "swa_num_key_value_heads": 4, "attention_bias": True},
    "many experts, no value scale": {"n_routed_experts": 32, "num_experts_per_tok": 8, "attention_value_scale": None},
}
LENGTH = 96


def random_model(changes: dict[str, Any], backend: BackendConfig, dtype: torch.dtype) -> MiMoV2FlashForCausalLM:
    config = MiMoV2FlashConfig(**{**SMALL, **changes})
    torch.manual_seed(sum(map(ord, str(sorted(changes.items())))))
    model = MiMoV2FlashForCausalLM(config, backend=backend)
    model.initialize_weights(dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if "attention_sink_bias" in name:
                tensor.normal_()
            elif "correction_bias" in name:
                tensor.normal_(std=0.2)
            elif "norm" in name:
                tensor.add_(0.1 * torch.randn_like(tensor))
            elif "proj" in name:
                tensor.mul_(4)  # std 0.08: attention and experts then matter next to the residual stream
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    return model.to(dtype)


def relative(ours: Tensor, reference: Tensor) -> float:
    """Norm of the difference in units of the reference's norm; an all-zero reference demands zero."""
    difference = (ours.detach().double() - reference.detach().double()).norm()
    norm = reference.detach().double().norm()
    return float(difference if norm == 0 else difference / norm)


@pytest.mark.parametrize(
    "backend", [BackendConfig(), BackendConfig(attn="eager", experts="torch")], ids=["fast", "plain"]
)
@pytest.mark.parametrize("changes", CASES.values(), ids=CASES.keys())
def test_logits_and_all_gradients_in_fp32(changes: dict[str, Any], backend: BackendConfig) -> None:
    model = random_model(changes, backend, torch.float32)
    twin = native_twin(model)
    ids = torch.randint(0, 89, (2, LENGTH))
    ours, reference = model(ids).logits, twin(ids, use_cache=False).logits
    assert relative(ours, reference) < 1e-5

    targets = torch.randint(0, 89, (2, LENGTH))
    F.cross_entropy(ours.flatten(0, 1), targets.flatten()).backward()
    F.cross_entropy(reference.flatten(0, 1), targets.flatten()).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    compared = 0
    for name, parameter in twin.named_parameters():
        assert parameter.grad is not None, name
        assert relative(to_native(name, gradients), parameter.grad) < 1e-5, name
        compared += 1
    assert compared == len(list(model.parameters()))


@pytest.mark.parametrize("changes", [CASES["published pattern"], CASES["group routing"]], ids=["pattern", "groups"])
def test_left_and_right_padding_equal_the_reference(changes: dict[str, Any]) -> None:
    model = random_model(changes, BackendConfig(), torch.float32)
    twin = native_twin(model)
    ids = torch.randint(0, 89, (3, LENGTH))
    mask = torch.ones(3, LENGTH, dtype=torch.int64)
    mask[0, :30] = 0  # left
    mask[1, 50:] = 0  # right
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        ours = model(ids, attention_mask=mask, position_ids=positions).logits
        reference = twin(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    real = mask.bool()
    assert relative(ours[real], reference[real]) < 1e-5


def test_the_loss_head_equals_the_reference_loss() -> None:
    model = random_model({}, BackendConfig(), torch.float32)
    twin = native_twin(model)
    ids = torch.randint(0, 89, (1, LENGTH))
    targets = torch.full((1, LENGTH), -100)
    targets[0, :-1] = ids[0, 1:]
    targets[0, 10:20] = -100
    labels = torch.cat((ids.new_full((1, 1), -100), targets[:, :-1]), dim=1)
    ours = model(ids, targets=targets, loss_chunk=7).loss / (targets != -100).sum()
    reference = twin(ids, labels=labels, use_cache=False).loss
    torch.testing.assert_close(ours, reference, rtol=1e-6, atol=0)


@pytest.mark.parametrize("changes", [CASES["published pattern"], CASES["all MoE"]], ids=["pattern", "all MoE"])
def test_bf16_next_token_distributions_stay_close(changes: dict[str, Any]) -> None:
    model = random_model(changes, BackendConfig(), torch.bfloat16)
    twin = native_twin(model)
    ids = torch.randint(0, 89, (2, LENGTH))
    with torch.no_grad():
        ours = model(ids).logits.float().log_softmax(-1)
        reference = twin(ids, use_cache=False).logits.float().log_softmax(-1)
    divergence = F.kl_div(ours, reference, log_target=True, reduction="none").sum(-1).mean()
    assert float(divergence) < 1e-3


def test_the_reference_window_counts_the_query_itself() -> None:
    """Window 8 means keys i-7 .. i in both stacks: changing token i-8 must not reach position i."""
    model = random_model({"num_hidden_layers": 1, "hybrid_layer_pattern": [1]}, BackendConfig(), torch.float32)
    twin = native_twin(model)
    ids = torch.randint(0, 89, (1, 40))
    other = ids.clone()
    other[0, 20] = (other[0, 20] + 1) % 89
    with torch.no_grad():
        for run in (lambda x: model(x).logits, lambda x: twin(x, use_cache=False).logits):
            changed = (run(ids) - run(other)).abs().amax(-1)[0] > 1e-6
            assert changed.nonzero().flatten().tolist() == list(range(20, 28))
