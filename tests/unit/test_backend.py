"""BackendConfig: defaults, choices, errors, and that every choice builds a model that computes the same."""

import subprocess
import sys
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import te_stand_in
import torch
from tiny_text import relative, tiny_config, tiny_model

from automimo.attention import available_backends
from automimo.backend import CHOICES, NOT_INSTALLED, PACKAGES, BackendConfig, usable
from automimo.errors import ConfigError
from automimo.mimo_v2_flash.model import MiMoV2FlashForCausalLM
from automimo.moe import EXPERT_BACKENDS


def test_defaults() -> None:
    config = BackendConfig()
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    assert values == {
        "attn": "sdpa",
        "linear": "torch",
        "rms_norm": "torch_fp32",
        "experts": "torch_mm",
        "dispatcher": "torch",
        "gate_precision": None,
        "enable_fsdp_optimizations": True,
        "enable_hf_state_dict_adapter": True,
    }


def test_the_choices_are_those_of_the_parts() -> None:
    assert set(CHOICES["attn"]) == {*available_backends(), "te"}  # te is no function but a module of the layer
    assert set(CHOICES["experts"]) == set(EXPERT_BACKENDS)
    assert not set(NOT_INSTALLED["attn"]) & set(CHOICES["attn"])


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("attn", "flash", ["'flash' is unknown", "sdpa, eager"]),
        ("attn", "flex", ["'flex' is not installed", "sdpa, eager"]),
        ("attn", None, ["backend.attn", "None"]),
        ("linear", "te", ["backend.linear", "'te'", "torch"]),
        ("rms_norm", "quack", ["backend.rms_norm", "torch_fp32, torch"]),
        ("experts", "gmm", ["backend.experts", "torch_mm, torch"]),
        ("gate_precision", "bfloat16", ["backend.gate_precision", "'bfloat16'", "float32"]),
        ("gate_precision", torch.bfloat16, ["backend.gate_precision", "'bfloat16'", "float32"]),
        ("experts", ["torch"], ["backend.experts", "['torch']"]),
    ],
)
def test_unknown_and_missing_choices(field: str, value: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        BackendConfig(**{field: value})
    for word in words:
        assert word in str(error.value)


def test_te_is_a_choice_exactly_where_transformer_engine_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine", None)  # not found
    assert usable("attn") == ("sdpa", "eager")
    with pytest.raises(ConfigError) as error:
        BackendConfig(attn="te")
    for word in ("'te' is not installed", "pip install", "transformer_engine[pytorch]", "choose one of: sdpa, eager"):
        assert word in str(error.value)
    with pytest.raises(ConfigError, match=r"'flex' is not installed here; choose one of: sdpa, eager$"):
        BackendConfig(attn="flex")

    te_stand_in.install(monkeypatch)
    assert usable("attn") == ("sdpa", "eager", "te")
    assert BackendConfig(attn="te").attn == "te"
    with pytest.raises(ConfigError, match=r"'flash' is unknown; choose one of: sdpa, eager, te$"):
        BackendConfig(attn="flash")


def test_packages_belong_to_choices() -> None:
    for field, packages in PACKAGES.items():
        assert set(packages) <= set(CHOICES[field])
        assert usable(field)


def test_looking_for_te_imports_nothing(tmp_path: Path) -> None:
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from automimo.backend import BackendConfig; "
        "BackendConfig(attn='te'); print('torch' in sys.modules, 'transformer_engine' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["False", "False"]


def test_unknown_fields_are_errors() -> None:
    with pytest.raises(TypeError, match="mok"):
        BackendConfig(mok=True)  # type: ignore[call-arg]


@pytest.mark.parametrize("given", ["float32", torch.float32, "torch.float32"])
def test_gate_precision_takes_a_dtype(given: Any) -> None:
    assert BackendConfig(gate_precision=given).gate_precision == "float32"


def test_it_needs_no_torch() -> None:
    code = "import sys; from automimo.backend import BackendConfig; BackendConfig(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"


def test_every_combination_computes_the_same() -> None:
    reference = tiny_model(attn="eager").eval()
    ids = torch.arange(40).unsqueeze(0)
    with torch.no_grad():
        expected = reference(ids).logits
        for attn, norm, experts, gate in product(
            available_backends(), CHOICES["rms_norm"], CHOICES["experts"], CHOICES["gate_precision"]
        ):
            backend = BackendConfig(attn=attn, rms_norm=norm, experts=experts, gate_precision=gate)
            model = MiMoV2FlashForCausalLM(tiny_config(), backend=backend).eval()
            model.load_state_dict(reference.state_dict())
            assert relative(model(ids).logits, expected) < 1e-5, backend
