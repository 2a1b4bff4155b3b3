"""AutoMiMo trains, fine-tunes and converts the MiMo-V2 model family. Importing it does not import torch.

The public names below are imported on first use, each from its own module.
"""

from typing import TYPE_CHECKING

from automimo.lazy import lazy_names

__version__ = "0.1.0"

if TYPE_CHECKING:
    from automimo.backend import BackendConfig
    from automimo.errors import AutoMiMoError, CheckpointError, ConfigError, DataError, TrainingError
    from automimo.generate import Chat, Sampling, load_chat, load_model
    from automimo.mimo_v2_flash.config import MiMoV2Config, MiMoV2FlashConfig
    from automimo.mimo_v2_flash.model import MiMoV2FlashForCausalLM, MiMoV2FlashModel, MiMoV2ForCausalLM
    from automimo.mimo_v2_flash.presets import PRESETS, preset_config
    from automimo.mimo_v2_flash.state_dict_adapter import MiMoV2FlashStateDictAdapter
    from automimo.moe.config import MoEConfig
    from automimo.report import model_card, write_report
    from automimo.training.recipe import Recipe
    from automimo.training.recipe_file import load_recipe
    from automimo.training.run import run_training

_HOME = {
    "AutoMiMoError": "errors",
    "BackendConfig": "backend",
    "Chat": "generate",
    "CheckpointError": "errors",
    "ConfigError": "errors",
    "DataError": "errors",
    "MiMoV2Config": "mimo_v2_flash.config",
    "MiMoV2FlashConfig": "mimo_v2_flash.config",
    "MiMoV2FlashForCausalLM": "mimo_v2_flash.model",
    "MiMoV2FlashModel": "mimo_v2_flash.model",
    "MiMoV2FlashStateDictAdapter": "mimo_v2_flash.state_dict_adapter",
    "MiMoV2ForCausalLM": "mimo_v2_flash.model",
    "MoEConfig": "moe.config",
    "PRESETS": "mimo_v2_flash.presets",
    "Recipe": "training.recipe",
    "Sampling": "generate",
    "TrainingError": "errors",
    "load_chat": "generate",
    "load_model": "generate",
    "load_recipe": "training.recipe_file",
    "model_card": "report",
    "preset_config": "mimo_v2_flash.presets",
    "run_training": "training.run",
    "write_report": "report",
}

__all__ = [
    "PRESETS",
    "AutoMiMoError",
    "BackendConfig",
    "Chat",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "MiMoV2Config",
    "MiMoV2FlashConfig",
    "MiMoV2FlashForCausalLM",
    "MiMoV2FlashModel",
    "MiMoV2FlashStateDictAdapter",
    "MiMoV2ForCausalLM",
    "MoEConfig",
    "Recipe",
    "Sampling",
    "TrainingError",
    "__version__",
    "load_chat",
    "load_model",
    "load_recipe",
    "model_card",
    "preset_config",
    "run_training",
    "write_report",
]

__getattr__, __dir__ = lazy_names(__name__, _HOME)
