"""Safetensors checkpoint folders: strict reading, streaming writing, atomic publication, resume. Knows no model."""

from automimo.checkpoint.adapter import StateDictAdapter
from automimo.checkpoint.ledger import Ledger
from automimo.checkpoint.mixin import HFCheckpointingMixin
from automimo.checkpoint.parallel_writer import Progress, write_units
from automimo.checkpoint.publish import publish_folder, publish_together, recover_folder, write_text_atomic
from automimo.checkpoint.reader import CheckpointReader
from automimo.checkpoint.resume import load_step, newest_step, save_step
from automimo.checkpoint.safetensors_file import TensorInfo, dtype_name, read_header
from automimo.checkpoint.side_files import SideFiles, copy_side_files, list_side_files
from automimo.checkpoint.units import FolderContents, SpreadUnit, Unit, plan_files
from automimo.checkpoint.work_folder import work_folder
from automimo.checkpoint.writer import (
    MAX_SHARD_BYTES,
    PlannedTensor,
    TensorEntry,
    WrittenCheckpoint,
    raw_entry,
    tensor_entry,
    write_checkpoint,
)

__all__ = [
    "MAX_SHARD_BYTES",
    "CheckpointReader",
    "FolderContents",
    "HFCheckpointingMixin",
    "Ledger",
    "PlannedTensor",
    "Progress",
    "SideFiles",
    "SpreadUnit",
    "StateDictAdapter",
    "TensorEntry",
    "TensorInfo",
    "Unit",
    "WrittenCheckpoint",
    "copy_side_files",
    "dtype_name",
    "list_side_files",
    "load_step",
    "newest_step",
    "plan_files",
    "publish_folder",
    "publish_together",
    "raw_entry",
    "read_header",
    "recover_folder",
    "save_step",
    "tensor_entry",
    "work_folder",
    "write_checkpoint",
    "write_text_atomic",
    "write_units",
]
