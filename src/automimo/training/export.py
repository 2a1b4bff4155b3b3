"""`final/`: the result of a run as a Hugging Face folder with a model card."""

import json
import shutil
from pathlib import Path
from typing import Literal

import torch

from automimo.checkpoint import publish_folder, write_text_atomic
from automimo.mimo_v2_flash.model import MiMoV2FlashForCausalLM
from automimo.report import model_card, write_report
from automimo.training.precision import MasterWeights
from automimo.training.run_folder import RunFolder
from automimo.training.summary import ModelSize

EXPORT_MARK = ".export.json"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def export_final(
    folder: RunFolder,
    source: Path,
    model: MiMoV2FlashForCausalLM,
    masters: MasterWeights,
    size: ModelSize,
    step: int,
    kind: Literal["bf16", "fp32", "source"],
) -> bool:
    """Publish `final/` from the fp32 masters, stored as `kind`; False if it is there already for this step and kind.

    Tokenizer, generation config and tensors that were not trained come from `source`, the folder the run started from.
    An older `final/` (of fewer steps) is replaced when the new one is complete on disk.
    """
    mark = json.dumps({"step": step, "dtype": kind}) + "\n"
    found = folder.final / EXPORT_MARK
    if found.is_file() and found.read_text(encoding="utf-8") == mark:
        return False
    picture = write_report(folder.root)
    card = model_card(folder.root, parameters=size.total, active_parameters=size.active)

    def write(temporary: Path) -> None:
        with masters.in_model():
            if kind == "source":
                model.save_pretrained(temporary, layout="source", source=source)
            else:
                model.save_pretrained(temporary, dtype=DTYPES[kind], source=source)
        shutil.copyfile(picture, temporary / picture.name)
        # The card of the model that the run started from may have been carried along; this one replaces it.
        write_text_atomic(temporary / "README.md", f"{card.rstrip()}\n\n![Loss of the run]({picture.name})\n")
        write_text_atomic(temporary / EXPORT_MARK, mark)

    publish_folder(folder.final, write, replace=True)
    return True
