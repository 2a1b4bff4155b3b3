"""How the released checkpoints and their re-exports store the model, and the way between any two such forms."""

from automimo.mimo_v2_flash.storage.decode import read_matrix
from automimo.mimo_v2_flash.storage.encode import encode_group
from automimo.mimo_v2_flash.storage.geometry import AttentionShape, attention_shape, released_tp
from automimo.mimo_v2_flash.storage.matrices import (
    StoredMatrix,
    StoredTensor,
    is_quantised,
    is_routed_expert,
    stored_tensors,
    stored_together,
)
from automimo.mimo_v2_flash.storage.stored_checkpoint import Description, SourceOptions, StoredCheckpoint, describe
from automimo.mimo_v2_flash.storage.target import TargetForm, quantization_config, target_form, target_matrices
from automimo.mimo_v2_flash.storage.tp_size import CheckpointTP

__all__ = [
    "AttentionShape",
    "CheckpointTP",
    "Description",
    "SourceOptions",
    "StoredCheckpoint",
    "StoredMatrix",
    "StoredTensor",
    "TargetForm",
    "attention_shape",
    "describe",
    "encode_group",
    "is_quantised",
    "is_routed_expert",
    "quantization_config",
    "read_matrix",
    "released_tp",
    "stored_tensors",
    "stored_together",
    "target_form",
    "target_matrices",
]
