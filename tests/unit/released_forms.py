"""Which synthetic releases there are, and what a user has to say to read them."""

from pathlib import Path

from released_oracle import FLASH, FLASH_FORMS, FORMS, OMNI, PRO, TP2, Shape

from automimo.checkpoint import CheckpointReader
from automimo.mimo_v2_flash.config import MiMoV2FlashConfig
from automimo.mimo_v2_flash.model import model_class_of
from automimo.mimo_v2_flash.source import read_config
from automimo.mimo_v2_flash.storage import SourceOptions, StoredCheckpoint

NAMES = {"flash": FLASH, "omni": OMNI, "pro": PRO, "tp2": TP2}
# OMNI is FLASH with towers: its text part needs no second run of every form.
CASES = [
    *((shape, form) for shape in (FLASH, TP2) for form in FORMS),
    *((PRO, form) for form in FORMS if form not in FLASH_FORMS),
    *((OMNI, form) for form in ("bf16-split", "bf16-fused", "fp8-fused", "mxfp4-fused")),
]


def options_of(shape: Shape, form: str) -> SourceOptions:
    """What a user has to say about a form that does not speak for itself."""
    if form == "bf16-fused":
        return SourceOptions(tp=shape.checkpoint_tp)
    if form.endswith("contiguous"):
        return SourceOptions(layout="contiguous")
    return SourceOptions(v_scales="own" if form == "fp8-flash-own" else "strip")


def config_of(folder: Path) -> MiMoV2FlashConfig:
    return read_config(folder, model_class_of(folder).config_class)


def open_stored(reader: CheckpointReader, options: SourceOptions | None = None) -> StoredCheckpoint:
    return StoredCheckpoint(reader, config_of(reader.folder), options)
