"""`final/`: the result of a run as a Hugging Face folder with a model card."""

import json
import shutil
from pathlib import Path
from typing import Literal

import torch

from automimo.checkpoint import publish_together, write_text_atomic
from automimo.distributed.world import on_main, rank, together
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

    All ranks have to call this. Tokenizer, generation config and tensors that were not trained come from `source`, the
    folder the run started from. An older `final/` (of fewer steps) is replaced when the new one is complete on disk.
    """
    mark = json.dumps({"step": step, "dtype": kind}) + "\n"
    # Rank 0 decides for all: on a network disk another one may still see an older folder.
    if on_main("looking for a finished export", lambda: _read_mark(folder)) == mark:
        return False
    with together("drawing the report"):
        report = _Report(folder, size) if rank() == 0 else None

    def write(temporary: Path) -> None:
        with masters.in_model():
            if kind == "source":
                model.write_folder(temporary, layout="source", source=source)
            else:
                model.write_folder(temporary, dtype=DTYPES[kind], source=source)
        with together("writing the model card"):
            if report is not None:
                report.write(temporary)
                write_text_atomic(temporary / EXPORT_MARK, mark)

    publish_together(folder.final, write, replace=True)
    return True


def _read_mark(folder: RunFolder) -> str:
    found = folder.final / EXPORT_MARK
    return found.read_text(encoding="utf-8") if found.is_file() else ""


class _Report:
    """Picture and model card of a run, made before hours of writing."""

    def __init__(self, folder: RunFolder, size: ModelSize) -> None:
        self._picture = write_report(folder.root)
        self._card = model_card(folder.root, parameters=size.total, active_parameters=size.active)

    def write(self, folder: Path) -> None:
        shutil.copyfile(self._picture, folder / self._picture.name)
        # The card of the model that the run started from may have been carried along; this one replaces it.
        text = f"{self._card.rstrip()}\n\n![Loss of the run]({self._picture.name})\n"
        write_text_atomic(folder / "README.md", text)
