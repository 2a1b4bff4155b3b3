"""AutoMiMo trains, fine-tunes and converts the MiMo-V2 model family. Importing it does not import torch.

The public names below are imported on first use, each from its own module.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from automimo.backend import BackendConfig
    from automimo.errors import AutoMiMoError, CheckpointError, ConfigError, DataError, TrainingError
    from automimo.generate import generate_text
    from automimo.mimo_v2_flash.config import MiMoV2Config, MiMoV2FlashConfig
    from automimo.mimo_v2_flash.model import MiMoV2FlashForCausalLM, MiMoV2FlashModel, MiMoV2ForCausalLM
    from automimo.mimo_v2_flash.presets import PRESETS, preset_config
    from automimo.mimo_v2_flash.state_dict_adapter import MiMoV2FlashStateDictAdapter
    from automimo.moe.config import MoEConfig
    from automimo.report import model_card, write_report
    from automimo.training.recipe import Recipe
    from automimo.training.recipe_file import load_recipe

_HOME = {
    "AutoMiMoError": "errors",
    "BackendConfig": "backend",
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
    "TrainingError": "errors",
    "generate_text": "generate",
    "load_recipe": "training.recipe_file",
    "model_card": "report",
    "preset_config": "mimo_v2_flash.presets",
    "write_report": "report",
}

__all__ = [  # noqa: RUF022, PLE0604 - one list of names, above
    "__version__",
    *_HOME,
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
