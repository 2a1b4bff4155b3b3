"""In how many tensor-parallel shards the checkpoint of a config was written, where only the config is at hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from automimo.checkpoint import CheckpointReader, TensorInfo
from automimo.checkpoint.folder import plain_file
from automimo.checkpoint.reader import INDEX_FILE
from automimo.checkpoint.safetensors_file import parse_json
from automimo.errors import CheckpointError
from automimo.mimo_v2_flash.config import MiMoV2FlashConfig
from automimo.mimo_v2_flash.storage.geometry import attention_shape, is_full
from automimo.mimo_v2_flash.storage.matrices import FP8_SCALE, FUSED
from automimo.mimo_v2_flash.storage.tp_size import FusedProjection, index_tp_size, resolve_tp

FUSED_WEIGHT = f".{FUSED}.weight"
REMEDY = "set checkpoint_tp_size in the model config (1 for rows in plain order: all of q, then k, then v)"


def resolve_checkpoint_tp(
    config: MiMoV2FlashConfig, revision: str | None, headers: Mapping[str, TensorInfo] | None = None
) -> int:
    """How many shards the fused projections of a config's checkpoint were written in.

    It is `metadata.tp_size` of the index of the folder that the config was read from, or the config's
    `checkpoint_tp_size`, or follows from the scale rows of full layers (of that folder, or of `headers`). A Hub id is
    only looked up in the cache. Raises CheckpointError when two of them disagree and when nothing tells.
    """
    folder = _source_folder(config, revision)
    index = None if folder is None else _read_index_tp_size(folder)
    stated = config.checkpoint_tp_size
    if index is not None and stated is not None and index != stated:
        raise CheckpointError(
            f"checkpoint_tp_size {stated} of the config disagrees with metadata.tp_size {index} of "
            f"{folder}; correct the wrong one"
        )
    known = index is not None or stated is not None
    found = fused_projections({**_folder_headers(folder, known), **(headers or {})}, config)
    if not found:
        size = index if index is not None else stated
        if size is None:
            raise CheckpointError(
                "nothing tells in how many tensor-parallel shards the fused q, k, v projections of this checkpoint "
                f"were written; {REMEDY}"
            )
        return size
    try:
        return resolve_tp(found, given=None, index=index, config=stated).size
    except CheckpointError as error:
        raise CheckpointError(f"{error}\nFor a state-dict adapter: {REMEDY}") from error


def fused_projections(headers: Mapping[str, TensorInfo], config: MiMoV2FlashConfig) -> list[FusedProjection]:
    """The fused projections among the tensors of a checkpoint (full keys)."""
    result = []
    for key in headers:
        if key.endswith(FUSED_WEIGHT) and key.startswith("model."):
            prefix = key.removesuffix(FUSED_WEIGHT)
            scale = headers.get(f"{key}{FP8_SCALE}")
            rows = scale.shape[0] if scale is not None and scale.shape else None
            result.append(FusedProjection(prefix, attention_shape(config, prefix), rows, is_full(config, prefix)))
    return result


def _source_folder(config: MiMoV2FlashConfig, revision: str | None) -> Path | None:
    """The local folder of the checkpoint that a config was read from: a folder, or a snapshot in the Hub cache."""
    name = config.name_or_path
    if not name:
        return None
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    revision = revision or vars(config).get("_commit_hash")
    try:
        path = try_to_load_from_cache(name, INDEX_FILE, revision=revision)
    except HFValidationError:
        return None
    return Path(path).parent if isinstance(path, str) else None


def _read_index_tp_size(folder: Path) -> int | None:
    """`metadata.tp_size` of a folder's index, None without one. Raises CheckpointError for a malformed index."""
    if not (folder / INDEX_FILE).exists():
        return None
    path = plain_file(folder, INDEX_FILE)
    index = parse_json(path.read_bytes(), str(path))
    metadata = index.get("metadata") if isinstance(index, dict) else None
    try:
        return index_tp_size(metadata) if isinstance(metadata, dict) else None
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _folder_headers(folder: Path | None, known: bool) -> dict[str, TensorInfo]:
    """The tensors of a folder. One without weights (a cache with the index alone) has none to tell.

    Raises CheckpointError for weights that cannot be read when they are needed, i.e. unless the shards are `known`.
    """
    if folder is None or not any(folder.glob("*.safetensors")):
        return {}
    try:
        with CheckpointReader(folder) as reader:
            return reader.tensors
    except CheckpointError:
        if known:
            return {}
        raise
