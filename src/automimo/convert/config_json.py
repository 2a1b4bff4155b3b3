"""The config.json of a converted folder: that of the source with what the conversion changes, and nothing else."""

from copy import deepcopy
from typing import Any

from automimo.mimo_v2_flash.config import MiMoV2Config, MiMoV2FlashConfig
from automimo.mimo_v2_flash.storage import TargetForm, quantization_config

DTYPES = {"BF16": "bfloat16", "F32": "float32", "F16": "float16", "F64": "float64"}


def converted_config(values: dict[str, Any], config: MiMoV2FlashConfig, form: TargetForm) -> dict[str, Any]:
    """`values` (the source's config.json) for a folder in `form`; keys keep their order.

    The layout is always written out for `mimo_v2`, whose readers disagree on what its absence means.
    """
    result = deepcopy(values)
    quantisation = quantization_config(form, config, values.get("quantization_config"))
    if quantisation is None:
        result.pop("quantization_config", None)
    else:
        result["quantization_config"] = quantisation
    if form.layout == "fused":
        result["attention_projection_layout"] = "fused_qkv"
    elif "attention_projection_layout" in result or config.model_type == MiMoV2Config.model_type:
        result["attention_projection_layout"] = "split"
    if form.layout == "split":
        result.pop("checkpoint_tp_size", None)
    elif "checkpoint_tp_size" in result:
        result["checkpoint_tp_size"] = form.tp
    for key in [key for key in ("dtype", "torch_dtype") if key in result] or ["dtype"]:
        result[key] = DTYPES[form.dtype]
    return result
