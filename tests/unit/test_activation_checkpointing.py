"""Recomputing the blocks in backward changes nothing: loss, every gradient and the expert counts are the same bits."""

from collections import Counter
from typing import Any

import pytest
import torch
from tiny_text import VOCAB, gradients, tiny_config, tiny_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from automimo.errors import ConfigError
from automimo.mimo_v2_flash.model import MiMoV2FlashForCausalLM
from automimo.moe import expert_load, moe_layers, reset_expert_load, set_aux_loss_scale, update_router_biases

CU = torch.tensor([0, 7, 8, 30, 30, 61])
IDS = torch.randint(0, VOCAB, (61,), generator=torch.Generator().manual_seed(8))
PADDED = {"input_ids": IDS[:60].view(3, 20), "attention_mask": torch.ones(3, 20, dtype=torch.int64).tril(15)}
INPUTS: dict[str, dict[str, Any]] = {
    "packed": {"input_ids": IDS, "cu_seqlens": CU},
    "padded": PADDED,
    "embeddings": {"inputs_embeds": torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(9))},
}


def step(model: MiMoV2FlashForCausalLM, inputs: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """One forward and backward: loss, gradients, expert counts."""
    model.zero_grad()
    reset_expert_load(model)
    shape = inputs["input_ids"].shape if "input_ids" in inputs else inputs["inputs_embeds"].shape[:2]
    targets = torch.randint(0, VOCAB, tuple(shape), generator=torch.Generator().manual_seed(10))
    loss = model(**inputs, targets=targets).loss
    loss.backward()
    return loss.detach(), gradients(model), expert_load(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("aux", [0.0, 0.3])
@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS.keys())
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputation_equals_none(
    mode: str, attn: str, inputs: dict[str, Any], aux: float, dtype: torch.dtype
) -> None:
    if "inputs_embeds" in inputs:
        inputs = {"inputs_embeds": inputs["inputs_embeds"].to(dtype)}
    model = tiny_model(attn=attn, moe={"aux_loss_coeff": aux}, dtype=dtype)
    set_aux_loss_scale(model, 0.25)
    loss, grads, load = step(model, inputs)
    model.model.set_activation_checkpointing(mode)
    again = step(model, inputs)
    assert torch.equal(loss, again[0])
    assert torch.equal(load, again[2])
    assert int(load.sum()) > 0
    assert grads.keys() == again[1].keys()
    for name, gradient in grads.items():
        assert torch.equal(gradient, again[1][name]), name
    model.model.set_activation_checkpointing("none")
    assert torch.equal(step(model, inputs)[1]["lm_head.weight"], grads["lm_head.weight"])


@pytest.mark.parametrize("mode", ["none", "full"])
def test_the_aux_loss_reaches_the_router(mode: str) -> None:
    """Against autograd on the loss written out: the gradient of `scale` times every layer's balance loss."""
    inputs = INPUTS["packed"]
    plain = tiny_model()
    balanced = tiny_model(moe={"aux_loss_coeff": 0.3})
    for model in (plain, balanced):
        model.model.set_activation_checkpointing(mode)
        set_aux_loss_scale(model, 0.25)
    loss, without, _ = step(plain, inputs)
    same, with_aux, _ = step(balanced, inputs)
    assert torch.equal(loss, same)  # the reported loss does not hold it
    difference = {name: with_aux[name] - without[name] for name in without}

    seen = []
    gates = [layer.gate for layer in moe_layers(balanced).values()]
    hooks = [gate.register_forward_hook(lambda _m, _i, out: seen.append(out.aux_loss)) for gate in gates]
    balanced.zero_grad()
    balanced.model.set_activation_checkpointing("none")
    set_aux_loss_scale(balanced, 0.0)
    balanced.model(**inputs)
    (0.25 * torch.stack(seen).sum()).backward()
    for hook in hooks:
        hook.remove()
    for name in ("model.layers.1.mlp.gate.weight", "model.layers.3.mlp.gate.weight", "model.embed_tokens.weight"):
        expected = gradients(balanced)[name]
        assert float(expected.abs().max()) > 0
        torch.testing.assert_close(difference[name], expected, rtol=1e-3, atol=1e-5 * float(without[name].abs().max()))


def test_counts_add_up_over_micro_batches_and_the_bias_follows() -> None:
    models = [tiny_model(moe={"gate_bias_update_factor": 0.01}) for _ in range(2)]
    models[1].model.set_activation_checkpointing("full")
    for model in models:
        for _ in range(3):
            model(**INPUTS["packed"], targets=IDS).loss.backward()
        # Two of six experts per token, three MoE layers, three micro-batches.
        assert expert_load(model).sum(1).tolist() == [3 * 2 * 61] * 3
        update_router_biases(model)
    biases = [[layer.gate.e_score_correction_bias for layer in moe_layers(model).values()] for model in models]
    for a, b in zip(*biases, strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(a, b)


def test_nothing_is_recomputed_without_gradients_or_in_evaluation() -> None:
    model = tiny_model()
    model.model.set_activation_checkpointing("full")
    calls = []
    # Before the forward: a recomputation ends as soon as it has what backward asked for.
    hook = model.model.layers["1"].register_forward_pre_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        model(**INPUTS["packed"])
    assert len(calls) == 1
    model.eval()
    model(**INPUTS["packed"], targets=IDS).loss.backward()
    assert len(calls) == 2
    model.train()
    model(**INPUTS["packed"], targets=IDS).loss.backward()
    hook.remove()
    assert len(calls) == 4  # forward and recompute


def test_the_choice_of_experts_is_not_made_again() -> None:
    """Top-k runs once per MoE layer, not twice: a flipped choice in the recompute could not fit the saved shapes."""

    for mode in ("full", "selective"):
        assert operations(mode)[torch.ops.aten.topk.default] == 3


class Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func] += 1
        return func(*args, **(kwargs or {}))


def operations(mode: str) -> Counter[Any]:
    model = tiny_model()
    model.model.set_activation_checkpointing(mode)
    with Count() as count:
        model(**INPUTS["packed"], targets=IDS).loss.backward()
    return count.calls


def test_selective_recomputes_every_second_product() -> None:
    # Two per MoE layer in forward (three of them) and their gradients, which are products of the same kind.
    grouped = torch.ops.aten._grouped_mm.default
    none, full, selective = (operations(mode)[grouped] for mode in ("none", "full", "selective"))
    assert none == 3 * 2 * 3
    # A recomputation ends as soon as it has what backward asked for: not necessarily with the last product.
    assert none < selective < full <= none + 3 * 2


def test_it_holds_less_between_forward_and_backward() -> None:
    """Bytes that autograd keeps: with recomputation the states between blocks, without it everything inside."""

    def kept(mode: str) -> int:
        model = tiny_model(tiny_config(num_hidden_layers=4))
        model.model.set_activation_checkpointing(mode)
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        sizes: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        ids = torch.zeros(2000, dtype=torch.int64)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(ids, cu_seqlens=torch.tensor([0, 2000]), targets=ids, loss_chunk=64).loss
        assert loss.requires_grad
        return sum(sizes.values())

    assert kept("full") < kept("none") / 3


def test_unknown_modes_are_refused() -> None:
    model = tiny_model()
    with pytest.raises(ConfigError, match="'some' is unknown; choose one of: none, full, selective"):
        model.model.set_activation_checkpointing("some")
    assert model.model.activation_checkpointing == "none"
