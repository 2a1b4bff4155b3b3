"""Safetensors checkpoint folders: strict reading, streaming writing, atomic publication, resume. Knows no model."""

from automimo.checkpoint.adapter import StateDictAdapter
from automimo.checkpoint.ledger import Ledger
from automimo.checkpoint.mixin import HFCheckpointingMixin
from automimo.checkpoint.publish import publish_folder, recover_folder, write_text_atomic
from automimo.checkpoint.reader import CheckpointReader
from automimo.checkpoint.resume import load_step, newest_step, save_step
from automimo.checkpoint.safetensors_file import TensorInfo, dtype_name, read_header
from automimo.checkpoint.side_files import SideFiles, copy_side_files
from automimo.checkpoint.writer import (
    MAX_SHARD_BYTES,
    TensorEntry,
    WrittenCheckpoint,
    raw_entry,
    tensor_entry,
    write_checkpoint,
)

__all__ = [
    "MAX_SHARD_BYTES",
    "CheckpointReader",
    "HFCheckpointingMixin",
    "Ledger",
    "SideFiles",
    "StateDictAdapter",
    "TensorEntry",
    "TensorInfo",
    "WrittenCheckpoint",
    "copy_side_files",
    "dtype_name",
    "load_step",
    "newest_step",
    "publish_folder",
    "raw_entry",
    "read_header",
    "recover_folder",
    "save_step",
    "tensor_entry",
    "write_checkpoint",
    "write_text_atomic",
]
