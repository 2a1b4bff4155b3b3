"""transformers' own MiMoV2FlashForCausalLM with the weights of one of our models: the independent reference."""

import torch
from torch import Tensor
from transformers.models.mimo_v2_flash import MiMoV2FlashConfig as NativeConfig
from transformers.models.mimo_v2_flash import MiMoV2FlashForCausalLM as NativeModel

from automimo.mimo_v2_flash.config import MiMoV2FlashConfig
from automimo.mimo_v2_flash.model import MiMoV2FlashForCausalLM


def native_config(config: MiMoV2FlashConfig) -> NativeConfig:
    """transformers' config, from what we would write to config.json."""
    return NativeConfig.from_dict(config.to_diff_dict())


def native_twin(model: MiMoV2FlashForCausalLM, experts: str = "eager") -> NativeModel:
    """The reference model with the weights of ours."""
    config = native_config(model.config)
    config._attn_implementation = "eager"
    config._experts_implementation = experts
    twin = NativeModel(config).to(model.lm_head.weight.dtype)
    ours = model.state_dict()
    with torch.no_grad():
        for name, tensor in twin.state_dict().items():
            tensor.copy_(to_native(name, ours))
    return twin.eval()


def to_native(native_name: str, ours: dict[str, Tensor]) -> Tensor:
    """One of our tensors (a weight or a gradient), in the reference's name and orientation."""
    name = native_name.replace("self_attn.sinks", "self_attn.attention_sink_bias")
    if name.endswith("experts.gate_up_proj"):
        return ours[name.replace("gate_up_proj", "gate_and_up_projs")].transpose(1, 2)
    if name.endswith("experts.down_proj"):
        return ours[name.replace("down_proj", "down_projs")].transpose(1, 2)
    return ours[name]
