"""Where a checkpoint comes from: a local folder, or a Hub id that is downloaded once into the shared cache."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from automimo.checkpoint.safetensors_file import parse_json
from automimo.errors import CheckpointError
from automimo.mimo_v2_flash.config import MiMoV2FlashConfig

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
# Objects and lists within each other; released files have 3. Copying and printing use the interpreter's stack, which
# ends at about 300.
MAX_CONFIG_DEPTH = 64


def resolve_folder(
    name_or_path: str | Path, revision: str | None = None, *, weights: bool = True, download: bool = True
) -> Path:
    """The local folder of a checkpoint.

    A path to an existing folder is taken as it is. Otherwise ``owner/name`` is fetched from the Hub (or found in its
    cache); `weights` False leaves the weight files out, `download` False looks into the cache only. Raises
    CheckpointError when there is nothing.
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return path
    name = str(name_or_path)
    if not _HUB_ID.fullmatch(name) or path.is_absolute():
        raise CheckpointError(f"{name}: no such folder; pass a checkpoint folder or a Hub id such as owner/name")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                ignore_patterns=None if weights else ["*.safetensors", "*.bin"],
                local_files_only=not download,
            )
        )
    except (HfHubHTTPError, HFValidationError, OSError) as error:  # not found in the cache is an OSError
        if not download:
            raise CheckpointError(
                f"{name}: no such folder, and not in the Hub's cache; download it first (hf download {name}) or pass a "
                "folder"
            ) from error
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{name}: no such folder, and the Hub could not supply it ({reason}); check the name, the revision and the "
            "connection, or download the folder and pass its path"
        ) from error


def read_config(folder: Path, config_class: type[MiMoV2FlashConfig]) -> MiMoV2FlashConfig:
    """The config of a checkpoint folder.

    Raises CheckpointError when there is no readable config.json, ConfigError when it contradicts itself.
    """
    config: MiMoV2FlashConfig = config_class.from_dict(config_values(folder), name_or_path=str(folder))
    return config


def config_values(folder: Path) -> dict[str, Any]:
    """What config.json of a checkpoint folder says, as it stands.

    Raises CheckpointError when it cannot be read, is no strict JSON (see `parse_json`) or is nested too deeply.
    """
    path = folder / "config.json"
    try:
        raw = path.read_bytes()
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder}: has no config.json, so it is not a model folder") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    values = parse_json(raw, f"{path}: cannot be read as JSON")
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: holds a {type(values).__name__} where a JSON object is expected")
    _check_depth(path, values)
    return values


def _check_depth(path: Path, values: dict[str, Any]) -> None:
    level: list[Any] = [values]
    for _ in range(MAX_CONFIG_DEPTH):
        inside = [entry for item in level for entry in (item.values() if isinstance(item, dict) else item)]
        level = [entry for entry in inside if isinstance(entry, dict | list)]
        if not level:
            return
    raise CheckpointError(
        f"{path}: objects and lists are nested more than {MAX_CONFIG_DEPTH} deep; this is no config of a model"
    )
