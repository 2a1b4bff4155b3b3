import subprocess
import sys

import pytest
import torch
from moe_oracle import make_config

from automimo.errors import ConfigError
from automimo.moe import MoEConfig


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"expert_activation": "geglu"}, ["expert_activation", "n_routed_experts", "route_scale"]),
        ({"score_func": "sqrtsoftplus"}, ["sqrtsoftplus", "sigmoid_with_bias", "softmax"]),
        ({"dtype": "fp8"}, ["fp8", "bfloat16"]),
        ({"n_shared_experts": 1}, ["n_shared_experts", "1", "null"]),
        ({"n_expert_groups": 3}, ["8", "3"]),
        ({"n_limited_groups": 2}, ["n_limited_groups", "2", "1"]),
        ({"n_activated_experts": 9}, ["9", "8"]),
        ({"n_expert_groups": 4, "n_limited_groups": 1, "n_activated_experts": 3}, ["3", "only 2", "1 of 4"]),
        ({"n_activated_experts": 0}, ["n_activated_experts", "0"]),
        ({"n_routed_experts": True}, ["n_routed_experts", "True"]),
        ({"dim": 16.0}, ["dim", "16.0"]),
        ({"route_scale": float("inf")}, ["route_scale", "inf"]),
        ({"aux_loss_coeff": -1e-3}, ["aux_loss_coeff", "-0.001"]),
        ({"gate_bias_update_factor": float("nan")}, ["gate_bias_update_factor", "nan"]),
        ({"norm_topk_prob": 1}, ["norm_topk_prob", "1"]),
        ({"train_gate": False, "gate_bias_update_factor": 0.1}, ["gate_bias_update_factor", "train_gate", "0.1"]),
    ],
)
def test_a_wrong_value_is_an_error_that_shows_it(changes, words):
    with pytest.raises(ConfigError) as error:
        make_config(**changes)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_missing_fields_are_listed():
    with pytest.raises(ConfigError, match=r"needs .*dim.*norm_topk_prob"):
        MoEConfig.from_dict({"n_routed_experts": 4})


@pytest.mark.parametrize("dtype", ["bf16", "bfloat16", "torch.bfloat16", torch.bfloat16])
def test_dtype_names(dtype):
    assert make_config(dtype=dtype).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("changes", "has_bias"),
    [
        ({"score_func": "sigmoid_with_bias"}, True),
        ({"score_func": "softmax_with_bias"}, True),
        ({"score_func": "sigmoid"}, False),
        ({"score_func": "softmax"}, False),
        ({"score_func": "softmax", "force_e_score_correction_bias": True}, True),
        ({"score_func": "sigmoid", "gate_bias_update_factor": 1e-3}, True),
    ],
)
def test_who_has_a_correction_bias(changes, has_bias):
    assert make_config(**changes).has_correction_bias is has_bias


def test_the_config_needs_no_torch():
    code = "import sys; from automimo.moe import MoEConfig; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_public_name_resolves():
    import automimo.moe

    assert all(getattr(automimo.moe, name) is not None for name in automimo.moe.__all__)
    with pytest.raises(AttributeError, match="nonsense"):
        _ = automimo.moe.nonsense
