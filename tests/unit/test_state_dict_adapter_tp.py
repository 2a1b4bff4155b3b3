"""`checkpoint_tp_size`: who says in how many shards a fused checkpoint was written, and what if they differ."""

import json
import socket
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from released_folders import built, config, released, write_folder, write_json
from released_oracle import FLASH, PRO, TP2, Shape

from automimo.backend import BackendConfig
from automimo.errors import CheckpointError
from automimo.mimo_v2_flash.config import MiMoV2Config, MiMoV2FlashConfig
from automimo.mimo_v2_flash.source import read_config
from automimo.mimo_v2_flash.state_dict_adapter import MiMoV2FlashStateDictAdapter

INDEX = "model.safetensors.index.json"


def adapter_for(settings: MiMoV2FlashConfig, revision: str | None = None) -> MiMoV2FlashStateDictAdapter:
    return MiMoV2FlashStateDictAdapter(settings, None, BackendConfig(), revision=revision)


def folder_with(path: Path, shape: Shape, form: str, tp: Any = None, stated: int | None = None) -> MiMoV2FlashConfig:
    """The config of a folder whose index says `tp` and whose config.json says `stated` (None: nothing)."""
    metadata = {} if tp is None else {"tp_size": tp}
    released(path, shape, form, metadata=metadata, side_files=False)
    if stated is not None:
        write_json(path / "config.json", {**config(shape, form), "checkpoint_tp_size": stated})
    flash = config(shape, form)["model_type"] == MiMoV2FlashConfig.model_type
    return read_config(path, MiMoV2FlashConfig if flash else MiMoV2Config)


@pytest.mark.parametrize(("tp", "stated"), [(None, None), (8, None), (None, 8), (8, 8)])
def test_of_a_folder(tmp_path: Path, tp: int | None, stated: int | None) -> None:
    adapter = adapter_for(folder_with(tmp_path / "model", PRO, "fp8-fused", tp, stated))
    assert adapter.checkpoint_tp_size == 8
    # Found out once: nothing is asked again.
    (tmp_path / "model" / INDEX).write_text("{broken")
    assert adapter.checkpoint_tp_size == 8


@pytest.mark.parametrize("shape", [FLASH, TP2])
def test_detected_in_the_headers(tmp_path: Path, shape: Shape) -> None:
    assert adapter_for(folder_with(tmp_path / "model", shape, "fp8-fused")).checkpoint_tp_size == shape.checkpoint_tp


@pytest.mark.parametrize(
    ("form", "tp", "stated", "words"),
    [
        ("fp8-fused", 4, 2, ["checkpoint_tp_size 2 of the config disagrees with metadata.tp_size 4", "correct"]),
        ("fp8-fused", 2, None, ["metadata.tp_size 2 disagrees with model.layers.0", "36 scale rows", "fit 4 shards"]),
        ("fp8-fused", None, 2, ["checkpoint_tp_size 2 disagrees with model.layers.0", "fit 4 shards"]),
        ("fp8-contiguous", None, None, ["plain order", "set checkpoint_tp_size in the model config (1 for"]),
        ("bf16-fused", None, None, ["not quantised", "set checkpoint_tp_size in the model config"]),
        ("bf16-split", None, None, ["nothing tells", "set checkpoint_tp_size in the model config"]),
        *[("fp8-fused", tp, None, ["invalid metadata.tp_size", repr(tp), INDEX]) for tp in (0, -4, True, "4", 4.0)],
    ],
)
def test_contradictions_and_silence(tmp_path: Path, form: str, tp: Any, stated: Any, words: list[str]) -> None:
    adapter = adapter_for(folder_with(tmp_path / "model", FLASH, form, tp, stated))
    for _ in range(2):  # an error is not remembered as an answer
        with pytest.raises(CheckpointError) as error:
            _ = adapter.checkpoint_tp_size
        for word in words:
            assert word in str(error.value)


@pytest.mark.parametrize("form", ["bf16-fused", "bf16-contiguous", "fp8-contiguous"])
def test_a_stated_number_is_enough(tmp_path: Path, form: str) -> None:
    expected = 1 if "contiguous" in form else 4
    assert adapter_for(folder_with(tmp_path / "a", FLASH, form, expected)).checkpoint_tp_size == expected
    assert adapter_for(folder_with(tmp_path / "b", FLASH, form, None, expected)).checkpoint_tp_size == expected
    assert adapter_for(MiMoV2Config(checkpoint_tp_size=expected)).checkpoint_tp_size == expected


def test_a_folder_with_the_index_alone(tmp_path: Path) -> None:
    settings = folder_with(tmp_path / "model", FLASH, "fp8-fused", 4)
    for path in (tmp_path / "model").glob("*.safetensors"):
        path.unlink()
    assert adapter_for(settings).checkpoint_tp_size == 4
    write_json(tmp_path / "model" / INDEX, {"metadata": {}, "weight_map": {}})
    with pytest.raises(CheckpointError, match="nothing tells"):
        _ = adapter_for(settings).checkpoint_tp_size


def test_a_broken_folder(tmp_path: Path) -> None:
    settings = folder_with(tmp_path / "model", FLASH, "fp8-fused")
    index = tmp_path / "model" / INDEX
    words = json.loads(index.read_text())
    words["weight_map"]["model.norm.weight"] = "elsewhere.safetensors"
    write_json(index, words)
    with pytest.raises(CheckpointError, match=r"elsewhere\.safetensors"):  # the headers are needed and not readable
        _ = adapter_for(settings).checkpoint_tp_size
    words["metadata"] = {"tp_size": 4}
    write_json(index, words)
    assert adapter_for(settings).checkpoint_tp_size == 4
    index.write_text("{broken")
    with pytest.raises(CheckpointError, match="index"):
        _ = adapter_for(settings).checkpoint_tp_size


def test_a_hub_id_is_looked_up_in_the_cache_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--owner--name"
    stored, _ = built(FLASH, "fp8-fused")
    commits = {"1" * 40: {"tp_size": 4}, "2" * 40: {}, "3" * 40: {"tp_size": 2}}
    for commit, metadata in commits.items():
        folder = repository / "snapshots" / commit
        folder.mkdir(parents=True)
        if commit[0] == "2":
            write_folder(folder, stored, config(FLASH, "fp8-fused"), metadata=metadata, side_files=False)
        else:
            write_json(folder / INDEX, {"metadata": metadata, "weight_map": {}})
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("1" * 40)

    def tp(revision: str | None = None, name: str = "owner/name", commit: str | None = None, **changes: Any) -> int:
        settings = MiMoV2Config.from_dict({**config(FLASH, "fp8-fused"), **changes}, name_or_path=name)
        if commit is not None:
            settings._commit_hash = commit
        return adapter_for(settings, revision).checkpoint_tp_size

    assert tp() == 4
    assert tp(revision="2" * 40) == 4  # from the scales of the cached files
    assert tp(revision="3" * 40) == 2
    assert tp(commit="3" * 40) == 2
    assert tp(revision="1" * 40, commit="3" * 40) == 4
    with pytest.raises(CheckpointError, match=r"disagrees with metadata\.tp_size 4"):
        tp(checkpoint_tp_size=2)
    for name in ("owner/absent", "no id/at all/..", "gone"):
        assert tp(name=name, checkpoint_tp_size=2) == 2
        with pytest.raises(CheckpointError, match="nothing tells"):
            tp(name=name)
