"""Very small random text models, shared by the tests of the model."""

from typing import Any

import torch
from torch import Tensor, nn

from automimo.backend import BackendConfig
from automimo.mimo_v2_flash.config import MiMoV2FlashConfig
from automimo.mimo_v2_flash.model import MiMoV2FlashForCausalLM

WINDOW = 5
VOCAB = 61
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "v_head_dim": 8,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 12,
    "swa_v_head_dim": 8,
    "hybrid_layer_pattern": [0, 1, 1, 0],
    "add_full_attention_sink_bias": True,
    "sliding_window": WINDOW,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "torch_dtype": "float32",
}


def tiny_config(**changes: Any) -> MiMoV2FlashConfig:
    return MiMoV2FlashConfig(**{**SMALL, **changes})


def tiny_model(
    config: MiMoV2FlashConfig | None = None,
    *,
    seed: int = 0,
    attn: str = "sdpa",
    moe: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    backend: BackendConfig | None = None,
) -> MiMoV2FlashForCausalLM:
    """Random weights in which everything matters (sinks, biases and norms too), all trainable, in training mode."""
    torch.manual_seed(seed)
    overrides = {"moe_overrides": moe} if moe else {}
    model = MiMoV2FlashForCausalLM(config or tiny_config(), backend=backend or BackendConfig(attn=attn), **overrides)
    model.initialize_weights(dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if "sink" in name or "correction" in name:
                tensor.normal_(std=0.5)
            elif "norm" in name:
                tensor.add_(0.1 * torch.randn_like(tensor))
            elif "proj" in name:
                tensor.mul_(8)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    return model.to(dtype).train()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def relative(ours: Tensor, reference: Tensor) -> float:
    """Norm of the difference in units of the reference's norm; a reference of zeros demands zeros."""
    difference, norm = (ours.double() - reference.double()).norm(), reference.double().norm()
    return float(difference.detach() if norm == 0 else (difference / norm).detach())


def assert_same_gradients(ours: dict[str, Tensor], reference: dict[str, Tensor], bound: float = 1e-5) -> None:
    assert ours.keys() == reference.keys()
    for name, gradient in reference.items():
        assert relative(ours[name], gradient) < bound, name
