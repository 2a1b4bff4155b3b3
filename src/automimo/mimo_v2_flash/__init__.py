"""The MiMo-V2 model family: configs, the text model and its checkpoints.

The names below are imported on first use, so that importing this package loads neither torch nor transformers.
"""

from typing import TYPE_CHECKING

from automimo.lazy import lazy_names

if TYPE_CHECKING:
    from automimo.mimo_v2_flash.config import MiMoV2Config, MiMoV2FlashConfig
    from automimo.mimo_v2_flash.model import MiMoV2FlashForCausalLM, MiMoV2FlashModel, MiMoV2ForCausalLM
    from automimo.mimo_v2_flash.state_dict_adapter import MiMoV2FlashStateDictAdapter

_HOME = {
    "MiMoV2Config": "config",
    "MiMoV2FlashConfig": "config",
    "MiMoV2FlashForCausalLM": "model",
    "MiMoV2FlashModel": "model",
    "MiMoV2FlashStateDictAdapter": "state_dict_adapter",
    "MiMoV2ForCausalLM": "model",
}

__all__ = [
    "MiMoV2Config",
    "MiMoV2FlashConfig",
    "MiMoV2FlashForCausalLM",
    "MiMoV2FlashModel",
    "MiMoV2FlashStateDictAdapter",
    "MiMoV2ForCausalLM",
]

__getattr__, __dir__ = lazy_names(__name__, _HOME)
