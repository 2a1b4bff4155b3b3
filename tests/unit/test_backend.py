"""BackendConfig: defaults, choices, errors, and that every choice builds a model that computes the same."""

import subprocess
import sys
from dataclasses import fields
from itertools import product
from typing import Any

import pytest
import torch
from tiny_text import relative, tiny_config, tiny_model

from automimo.attention import available_backends
from automimo.backend import CHOICES, NOT_INSTALLED, BackendConfig
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
    assert set(CHOICES["attn"]) == set(available_backends())
    assert set(CHOICES["experts"]) == set(EXPERT_BACKENDS)
    assert not set(NOT_INSTALLED["attn"]) & set(CHOICES["attn"])


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("attn", "flash", ["'flash' is unknown", "sdpa, eager"]),
        ("attn", "te", ["'te' is not installed", "sdpa, eager"]),
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
            CHOICES["attn"], CHOICES["rms_norm"], CHOICES["experts"], CHOICES["gate_precision"]
        ):
            backend = BackendConfig(attn=attn, rms_norm=norm, experts=experts, gate_precision=gate)
            model = MiMoV2FlashForCausalLM(tiny_config(), backend=backend).eval()
            model.load_state_dict(reference.state_dict())
            assert relative(model(ids).logits, expected) < 1e-5, backend
