"""Every accepted input form gives what the documents give one by one: logits, gradients and expert counts."""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from tiny_text import VOCAB, WINDOW, assert_same_gradients, gradients, relative, tiny_config, tiny_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from automimo.errors import ConfigError, DataError
from automimo.mimo_v2_flash.model import MiMoV2FlashForCausalLM, compute_lm_head_logits
from automimo.moe import expert_load, reset_expert_load

# One token, shorter than the window, equal, one more, and much longer.
LENGTHS = (7, 1, 3, WINDOW, WINDOW + 1, 23)


def documents() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCAB, (n,), generator=generator) for n in LENGTHS]


def targets_of(document: Tensor) -> Tensor:
    return (document * 7 + torch.arange(document.numel())) % VOCAB


class Form(NamedTuple):
    """An input: arguments of the model and, per document, its places in the flattened input of `size` tokens."""

    inputs: dict[str, Any]
    places: list[Tensor]
    size: int


# -- the forms --------------------------------------------------------------------------------------------------------


def rows(mask_dtype: torch.dtype, left: Callable[[int], int], extra_row: bool = False) -> Form:
    """One document per row of a padded batch; document d starts at column left(d)."""
    docs = documents()
    width = max(left(d) + doc.numel() for d, doc in enumerate(docs)) + 2
    batch = len(docs) + int(extra_row)
    ids = torch.full((batch, width), 3)
    mask = torch.zeros(batch, width, dtype=mask_dtype)
    places = []
    for d, doc in enumerate(docs):
        columns = slice(left(d), left(d) + doc.numel())
        ids[d, columns], mask[d, columns] = doc, True
        places.append(torch.arange(columns.start, columns.stop) + d * width)
    return Form({"input_ids": ids, "attention_mask": mask}, places, batch * width)


def two_rows() -> tuple[Tensor, Tensor, list[Tensor]]:
    """ids [2, S], document numbers [2, S] (0: padding) with several documents per row, and the places."""
    docs = documents()
    split = [docs[:4], docs[4:]]
    width = max(sum(doc.numel() for doc in row) for row in split) + 2
    ids, numbers = torch.full((2, width), 5), torch.zeros(2, width, dtype=torch.int64)
    places = []
    for r, row in enumerate(split):
        start = r  # the second row starts with padding
        for number, doc in enumerate(row):
            stop = start + doc.numel()
            ids[r, start:stop], numbers[r, start:stop] = doc, number + 1
            places.append(torch.arange(start, stop) + r * width)
            start = stop
    return ids, numbers, places


def document_mask() -> tuple[Tensor, Tensor, list[Tensor]]:
    ids, numbers, places = two_rows()
    same = (numbers[:, :, None] == numbers[:, None, :]) & (numbers > 0)[:, None, :]
    return ids, (same & torch.ones_like(same).tril()).unsqueeze(1), places


def numbered(name: str) -> Form:
    ids, numbers, places = two_rows()
    return Form({"input_ids": ids, name: numbers}, places, ids.numel())


def numbered_with_padding_mask() -> Form:
    """`_packed_seq_ids` may number padding too; the 2-D mask says what is real."""
    ids, numbers, places = two_rows()
    loud = torch.where(numbers == 0, 9, numbers)
    inputs = {"input_ids": ids, "_packed_seq_ids": loud, "attention_mask": (numbers > 0).long()}
    return Form(inputs, places, ids.numel())


def four_dimensional(additive: float | None) -> Form:
    ids, mask, places = document_mask()
    if additive is not None:
        mask = torch.zeros(mask.shape).masked_fill(~mask, additive)
    return Form({"input_ids": ids, "attention_mask": mask}, places, ids.numel())


def dictionary(sliding_key: str) -> Form:
    ids, mask, places = document_mask()
    distance = torch.arange(ids.shape[1])[:, None] - torch.arange(ids.shape[1])
    masks = {"full_attention": mask, sliding_key: mask & (distance < WINDOW)}
    return Form({"input_ids": ids, "attention_mask": masks}, places, ids.numel())


def bounds(lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def packed(**changes: Any) -> Form:
    docs = documents()
    ids = torch.cat(docs)
    inputs = {"input_ids": ids, "cu_seqlens": bounds(), **changes}
    return Form(inputs, list(torch.arange(ids.numel()).split([doc.numel() for doc in docs])), ids.numel())


def packed_row() -> Form:
    form = packed(qkv_format="thd", max_seqlen=torch.tensor([max(LENGTHS)]))
    return form._replace(inputs={**form.inputs, "input_ids": form.inputs["input_ids"].unsqueeze(0)})


def packed_with_padding() -> Form:
    """Every document is padded to a multiple of 4, as context parallelism wants it."""
    ids, padding, places, start, padded = [], [], [], 0, []
    for doc in documents():
        room = -(-doc.numel() // 4) * 4
        ids.append(torch.cat((doc, torch.full((room - doc.numel(),), 2))))
        padding.append(torch.arange(room) >= doc.numel())
        places.append(torch.arange(start, start + doc.numel()))
        padded.append(room)
        start += room
    inputs = {
        "input_ids": torch.cat(ids),
        "padding_mask": torch.cat(padding),
        "cu_seqlens": bounds(),
        "cu_seqlens_padded": bounds(tuple(padded)),
        "qkv_format": "thd",
    }
    return Form(inputs, places, start)


def packed_with_empty_documents() -> Form:
    lengths = (0, LENGTHS[0], 0, 0, *LENGTHS[1:], 0)
    return packed(cu_seqlens=bounds(lengths))


def own_positions() -> Form:
    """Positions may start anywhere: only differences enter the scores."""
    return packed(position_ids=torch.cat([torch.arange(n) + 11 * n for n in LENGTHS]).unsqueeze(0))


def padding_mask_only() -> Form:
    form = rows(torch.bool, lambda d: 0)
    return form._replace(inputs={"input_ids": form.inputs["input_ids"], "padding_mask": ~form.inputs["attention_mask"]})


def both_masks() -> Form:
    form = rows(torch.int64, lambda d: 2 * d)
    return form._replace(inputs={**form.inputs, "padding_mask": form.inputs["attention_mask"] == 0})


def positions_per_row() -> Form:
    form = rows(torch.int64, lambda d: d)
    positions = (form.inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    return form._replace(inputs={**form.inputs, "position_ids": positions})


FORMS: dict[str, Callable[[], Form]] = {
    "right padding, int mask": lambda: rows(torch.int64, lambda d: 0),
    "left padding, bool mask": lambda: rows(torch.bool, lambda d: 30 - LENGTHS[d]),
    "padding on both sides, float mask": lambda: rows(torch.float32, lambda d: 3 * d),
    "a row of padding only": lambda: rows(torch.int32, lambda d: d % 2, extra_row=True),
    "positions given": positions_per_row,
    "padding_mask only": padding_mask_only,
    "padding_mask and attention_mask": both_masks,
    "document numbers in the mask": lambda: numbered("attention_mask"),
    "document numbers in _packed_seq_ids": lambda: numbered("_packed_seq_ids"),
    "_packed_seq_ids with a 2-D mask": numbered_with_padding_mask,
    "4-D bool": lambda: four_dimensional(None),
    "4-D additive, dtype minimum": lambda: four_dimensional(torch.finfo(torch.float32).min),
    "4-D additive, -inf": lambda: four_dimensional(float("-inf")),
    "dictionary": lambda: dictionary("sliding_attention"),
    "dictionary, alias": lambda: dictionary("sliding_window_attention"),
    "packed [T]": packed,
    "packed [1, T], thd": packed_row,
    "packed, int32": lambda: packed(cu_seqlens=bounds().to(torch.int32)),
    "packed, one row of boundaries": lambda: packed(cu_seqlens=bounds().unsqueeze(0)),
    "packed, sentinels": lambda: packed(cu_seqlens=torch.cat((bounds(), torch.tensor([-1000, -1000])))),
    "packed, padded documents": packed_with_padding,
    "packed, empty documents": packed_with_empty_documents,
    "packed, own positions": own_positions,
}


# -- the truth --------------------------------------------------------------------------------------------------------


@cache
def truth() -> tuple[list[Tensor], dict[str, Tensor], Tensor]:
    """Logits per document, gradients of the summed loss and expert counts, on `eager`, one document at a time."""
    model = tiny_model(attn="eager")
    logits = []
    for doc in documents():
        with torch.no_grad():
            logits.append(model(doc.unsqueeze(0)).logits[0])
    reset_expert_load(model)
    for doc in documents():
        model(doc.unsqueeze(0), targets=targets_of(doc).unsqueeze(0)).loss.backward()
    return logits, gradients(model), expert_load(model)


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("name", FORMS)
def test_logits_gradients_and_counts(name: str, attn: str) -> None:
    form = FORMS[name]()
    model = tiny_model(attn=attn)
    logits, expected, load = truth()
    with torch.no_grad():
        found = model(**form.inputs).logits
    shape = tuple(form.inputs["input_ids"].shape)
    assert found.shape == (*(shape if len(shape) == 2 else (1, *shape)), VOCAB)
    for place, reference in zip(form.places, logits, strict=True):
        assert relative(found.view(-1, VOCAB)[place], reference) < 1e-5

    reset_expert_load(model)
    targets = torch.full((form.size,), -100)
    for place, doc in zip(form.places, documents(), strict=True):
        targets[place] = targets_of(doc)
    model(**form.inputs, targets=targets.view(form.inputs["input_ids"].shape), loss_chunk=4).loss.backward()
    assert_same_gradients(gradients(model), expected)
    # Padding is routed nowhere, so nothing of it is counted.
    assert torch.equal(expert_load(model), load)


@pytest.mark.parametrize("sinks", [(True, True), (False, True), (False, False)], ids=str)
@pytest.mark.parametrize("pattern", [[0, 0], [1, 1]], ids=["full", "sliding"])
def test_packed_equals_separate_for_each_layer_kind(pattern: list[int], sinks: tuple[bool, bool]) -> None:
    config = tiny_config(
        num_hidden_layers=2,
        hybrid_layer_pattern=pattern,
        add_full_attention_sink_bias=sinks[0],
        add_swa_attention_sink_bias=sinks[1],
    )
    separate, together = tiny_model(config, attn="eager"), tiny_model(config)
    for doc in documents():
        separate(doc.unsqueeze(0), targets=targets_of(doc).unsqueeze(0)).loss.backward()
    form = packed()
    together(**form.inputs, targets=torch.cat([targets_of(doc) for doc in documents()])).loss.backward()
    found = gradients(together)
    assert_same_gradients(found, gradients(separate))
    trained = [name for name, gradient in found.items() if "sink" in name and gradient.abs().max() > 0]
    assert len(trained) == (2 if sinks[pattern[0]] else 0)


@pytest.mark.parametrize("shape", ["TD", "1TD", "BSD"])
def test_embeddings_instead_of_ids(shape: str) -> None:
    form = rows(torch.int64, lambda d: d) if shape == "BSD" else packed()
    model = tiny_model()
    ids = form.inputs.pop("input_ids")
    embeds = model.get_input_embeddings()(ids).detach().requires_grad_(True)
    given = embeds.unsqueeze(0) if shape == "1TD" else embeds
    output = model(inputs_embeds=given, **form.inputs).logits
    for place, reference in zip(form.places, truth()[0], strict=True):
        assert relative(output.reshape(-1, VOCAB)[place], reference) < 1e-5
    output.reshape(-1, VOCAB)[torch.cat(form.places)].square().sum().backward()
    assert embeds.grad is not None
    norms = embeds.grad.reshape(form.size, -1).norm(dim=-1)
    real = torch.zeros(form.size, dtype=torch.bool)
    real[torch.cat(form.places)] = True
    assert bool((norms[real] > 0).all())
    assert bool((norms[~real] == 0).all())


def test_embeddings_win_over_ids_and_ignore_media() -> None:
    model = tiny_model().eval()
    ids, other = torch.arange(6).unsqueeze(0), torch.arange(6, 12).unsqueeze(0)
    embeds = model.get_input_embeddings()(ids)
    with torch.no_grad():
        a = model(other, inputs_embeds=embeds, pixel_values=torch.zeros(1)).logits
        torch.testing.assert_close(a, model(ids).logits, rtol=0, atol=0)


def test_the_gradient_reaches_exactly_the_used_embeddings() -> None:
    model = tiny_model()
    ids = torch.tensor([[1, 4, 4, 9]])
    model(ids, targets=torch.tensor([[2, -100, 5, -100]])).loss.backward()
    gradient = model.model.embed_tokens.weight.grad
    assert gradient is not None
    # Token 9 is the last one and has no target: nothing looks at it.
    assert gradient.norm(dim=1).nonzero().flatten().tolist() == [1, 4]


# -- masks that are not documents -------------------------------------------------------------------------------------

HOLES = torch.tensor(
    [
        [0, 1, 1, 0, 0, 1, 1, 1, 0, 1, 1, 0],
        [1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 1],
        [0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1],
    ]
)
# Document 1 comes back after document 2: its two parts see each other.
RECURRING = torch.tensor([[1, 1, 1, 2, 2, 1, 1, 0, 3, 3, 3, 3]])


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("mask", [HOLES, HOLES.bool(), RECURRING], ids=["int", "bool", "recurring"])
def test_masks_with_holes_count_distances_by_row(mask: Tensor, attn: str) -> None:
    model = tiny_model(attn=attn)
    length = mask.shape[1]
    ids = torch.randint(0, VOCAB, tuple(mask.shape), generator=torch.Generator().manual_seed(3))
    numbers = mask.long()
    distance = torch.arange(length)[:, None] - torch.arange(length)
    same = (numbers[:, :, None] == numbers[:, None, :]) & (numbers > 0)[:, None, :]
    full = (same & (distance >= 0)).unsqueeze(1)
    with torch.no_grad():
        found = model(ids, attention_mask=mask).logits
        load = expert_load(model)
        reset_expert_load(model)
        masks = {"full_attention": full, "sliding_attention": full & (distance < WINDOW)}
        expected = model(ids, attention_mask=masks, padding_mask=numbers == 0).logits
    torch.testing.assert_close(found[numbers > 0], expected[numbers > 0], rtol=1e-5, atol=1e-5)
    assert torch.equal(load, expert_load(model))
    assert load.sum(1).tolist() == [2 * int((numbers > 0).sum())] * 3


def test_a_hole_is_not_a_boundary() -> None:
    """Tokens on both sides of a hole see each other, on both backends."""
    ids = torch.randint(0, VOCAB, (1, 8), generator=torch.Generator().manual_seed(4))
    other = ids.clone()
    other[0, 1] = (other[0, 1] + 1) % VOCAB
    mask = torch.tensor([[1, 1, 1, 0, 1, 1, 1, 1]])
    model = tiny_model().eval()
    with torch.no_grad():
        change = (model(ids, attention_mask=mask).logits - model(other, attention_mask=mask).logits).abs().amax(-1)[0]
    assert bool((change[torch.tensor([1, 2, 4, 5, 6, 7])] > 1e-4).all())
    assert float(change[0]) == 0.0


@pytest.mark.parametrize("additive", [False, True])
def test_a_4d_mask_for_the_whole_batch_and_per_head(additive: bool) -> None:
    model = tiny_model().eval()
    ids = torch.randint(0, VOCAB, (3, 9), generator=torch.Generator().manual_seed(5))
    causal = torch.ones(9, 9, dtype=torch.bool).tril()
    mask = torch.zeros(9, 9).masked_fill(~causal, float("-inf")) if additive else causal
    with torch.no_grad():
        plain = model(ids).logits
        for shape in ((1, 1, 9, 9), (3, 1, 9, 9), (3, 4, 9, 9)):
            found = model(ids, attention_mask=mask.expand(shape)).logits
            torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-5)


def test_none_in_a_dictionary_means_causal() -> None:
    model = tiny_model().eval()
    ids = torch.randint(0, VOCAB, (2, 9))
    with torch.no_grad():
        found = model(ids, attention_mask={"full_attention": None, "sliding_attention": None}).logits
        torch.testing.assert_close(found, model(ids).logits, rtol=1e-5, atol=1e-5)


def test_mask_mapping_of_the_interface() -> None:
    model = tiny_model().model
    embeds, positions = torch.zeros(2, 4, 32), torch.arange(4).unsqueeze(0)
    masks = model._build_causal_mask_mapping(embeds, None, positions, positions[0])
    assert set(masks) == {"full_attention", "sliding_attention"}
    assert torch.equal(masks["full_attention"][0, 0], torch.ones(4, 4, dtype=torch.bool).tril())
    document = torch.ones(2, 1, 4, 4, dtype=torch.bool)
    narrow = tiny_model(tiny_config(sliding_window=2)).model
    masks = narrow._build_causal_mask_mapping(embeds, document, positions, positions[0])
    # The document mask is used as it is on full layers, and within the causal window on sliding ones.
    assert masks["full_attention"] is document
    expected = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    assert masks["sliding_attention"][0, 0].long().tolist() == expected
    full_only = tiny_model(tiny_config(hybrid_layer_pattern=[0, 0, 0, 0])).model
    assert set(full_only._build_causal_mask_mapping(embeds, None, positions, positions[0])) == {"full_attention"}


# -- shapes at the edges ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_the_smallest_inputs(attn: str) -> None:
    model = tiny_model(attn=attn)
    one = torch.tensor([7])
    with torch.no_grad():
        packed_one = model(one, cu_seqlens=torch.tensor([0, 1])).logits
        batch_one = model(one.unsqueeze(0)).logits
    assert packed_one.shape == batch_one.shape == (1, 1, VOCAB)
    torch.testing.assert_close(packed_one, batch_one, rtol=0, atol=0)
    loss = model(one, cu_seqlens=torch.tensor([0, 0, 1, 1]), targets=torch.tensor([3])).loss
    loss.backward()
    torch.testing.assert_close(loss.detach(), -batch_one[0, 0].log_softmax(-1)[3], rtol=1e-6, atol=1e-6)
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_a_window_longer_than_the_input_is_full_attention(attn: str) -> None:
    ids = torch.randint(0, VOCAB, (2, 9))
    wide = tiny_model(tiny_config(sliding_window=100), attn=attn).eval()
    exact = tiny_model(tiny_config(sliding_window=9), attn=attn).eval()
    narrow = tiny_model(tiny_config(sliding_window=8), attn=attn).eval()
    with torch.no_grad():
        a, b, c = (model(ids).logits for model in (wide, exact, narrow))
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(a[:, :8], c[:, :8], rtol=1e-5, atol=1e-5)
    assert float((a[:, 8] - c[:, 8]).abs().max()) > 1e-4


def test_nothing_but_padding() -> None:
    model = tiny_model()
    output = model(torch.zeros(2, 3, dtype=torch.int64), attention_mask=torch.zeros(2, 3, dtype=torch.int64))
    assert output.logits.shape == (2, 3, VOCAB)
    assert int(expert_load(model).sum()) == 0
    loss = model(
        torch.zeros(2, 3, dtype=torch.int64),
        attention_mask=torch.zeros(2, 3, dtype=torch.int64),
        targets=torch.full((2, 3), -100),
    ).loss
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert all(float(g.abs().max()) == 0.0 for g in gradients(model).values())


def test_no_leak_between_documents_or_backwards() -> None:
    form = packed()
    other = form.inputs["input_ids"].clone()
    document = form.places[3]
    other[document[2]] = (other[document[2]] + 1) % VOCAB
    model = tiny_model().eval()
    with torch.no_grad():
        change = (model(**form.inputs).logits - model(other, cu_seqlens=bounds()).logits).abs().amax(-1)[0]
    assert change.nonzero().flatten().tolist() == document[2:].tolist()


# -- outputs ----------------------------------------------------------------------------------------------------------


def test_logits_to_keep() -> None:
    model = tiny_model().eval()
    ids = torch.randint(0, VOCAB, (2, 9))
    with torch.no_grad():
        all_logits = model(ids).logits
        stream = model(ids.flatten(), cu_seqlens=torch.tensor([0, 9, 18])).logits
        assert stream.shape == (1, 18, VOCAB)
        for keep, expected in ((0, slice(None)), (1, slice(8, 9)), (4, slice(5, 9)), (99, slice(None))):
            found = model(ids, logits_to_keep=keep).logits
            torch.testing.assert_close(found, all_logits[:, expected], rtol=1e-6, atol=1e-6)
        picked = torch.tensor([8, 0, 3])
        found = model(ids, logits_to_keep=picked).logits
        torch.testing.assert_close(found, all_logits[:, picked], rtol=1e-6, atol=1e-6)
        found = model(ids.flatten(), cu_seqlens=torch.tensor([0, 9, 18]), logits_to_keep=2).logits
        torch.testing.assert_close(found, stream[:, 16:], rtol=1e-6, atol=1e-6)
        ends = torch.tensor([8, 17])
        found = model(ids.flatten(), cu_seqlens=torch.tensor([0, 9, 18]), logits_to_keep=ends).logits
        assert found.shape == (1, 2, VOCAB)
        torch.testing.assert_close(found[0], all_logits[:, 8], rtol=1e-5, atol=1e-5)


def test_without_a_head_the_logits_are_the_states() -> None:
    states = torch.randn(2, 3, 4)
    assert compute_lm_head_logits(None, states).logits is not None
    torch.testing.assert_close(compute_lm_head_logits(None, states, 1).logits, states[:, -1:])
    assert compute_lm_head_logits(None, states[0], is_thd=True).logits.shape == (1, 3, 4)


@pytest.mark.parametrize("name", ["right padding, int mask", "packed [T]", "4-D bool"])
def test_hidden_states(name: str) -> None:
    form = FORMS[name]()
    model = tiny_model().eval()
    ids = form.inputs["input_ids"]
    with torch.no_grad():
        assert model(**form.inputs).hidden_states is None
        output = model(**form.inputs, output_hidden_states=True)
        states = output.hidden_states
        assert [tuple(state.shape) for state in states] == [(*ids.shape, 32)] * 5
        real = torch.cat(form.places)
        embeds = model.get_input_embeddings()(ids)
        torch.testing.assert_close(states[0].flatten(0, -2)[real], embeds.flatten(0, -2)[real], rtol=0, atol=0)
        logits = model.lm_head(states[-1])
        torch.testing.assert_close(logits.flatten(0, -2)[real], output.logits.flatten(0, -2)[real])
        last = model.model(**form.inputs)
        torch.testing.assert_close(last, states[-1], rtol=0, atol=0)
        model.config.output_hidden_states = True
        assert len(model(**form.inputs).hidden_states) == 5
        assert model(**form.inputs, output_hidden_states=False).hidden_states is None
        assert len(model(**form.inputs, targets=torch.full(ids.shape, -100)).hidden_states) == 5


def test_loss_is_the_sum_over_valid_targets() -> None:
    model = tiny_model()
    ids = torch.randint(0, VOCAB, (2, 9))
    targets = torch.randint(0, VOCAB, (2, 9))
    targets[0, 3:6] = -100
    logits = model(ids).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    for chunk in (1, 4, 1024):
        output = model(ids, targets=targets, loss_chunk=chunk)
        assert output.logits is None
        assert output.loss.dtype == torch.float32
        torch.testing.assert_close(output.loss, expected, rtol=1e-6, atol=0)


def test_expert_counts_only_in_training() -> None:
    model = tiny_model().eval()
    model(torch.zeros(1, 4, dtype=torch.int64))
    assert int(expert_load(model).sum()) == 0
    model.train()
    model(torch.zeros(1, 4, dtype=torch.int64))
    assert expert_load(model).sum(1).tolist() == [8, 8, 8]


# -- memory -----------------------------------------------------------------------------------------------------------


class LargestStorage(TorchDispatchMode):
    """Bytes of the largest storage that any operation returns, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor):
                self.nbytes = max(self.nbytes, tensor.untyped_storage().nbytes())
        return result


def largest(model: MiMoV2FlashForCausalLM, ids: Tensor, cu_seqlens: Tensor) -> int:
    targets = ids.roll(-1)
    with LargestStorage() as mode:
        model(ids, cu_seqlens=cu_seqlens, targets=targets, loss_chunk=256).loss.backward()
    return mode.nbytes


CUTS = {"one": [0, 4096], "four": [0, 1000, 1001, 1100, 4096], "many": list(range(0, 4097, 64))}
TWO_HEADS = {"num_attention_heads": 2, "swa_num_attention_heads": 2}


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS.keys())
def test_no_square_and_no_full_logits(cuts: list[int]) -> None:
    """T = 4096, V = 3000: a T x T mask of booleans is 16 MiB, full fp32 logits are 47 MiB."""
    config = tiny_config(num_hidden_layers=2, hybrid_layer_pattern=[0, 1], vocab_size=3000, **TWO_HEADS)
    ids = torch.randint(0, 3000, (4096,))
    # The largest is a strip of scores of the full layer: 128 rows x 2 heads x 4096 keys in fp32.
    assert largest(tiny_model(config), ids, torch.tensor(cuts)) <= 4 * 2**20


def test_the_memory_probe_sees_a_square() -> None:
    config = tiny_config(num_hidden_layers=1, hybrid_layer_pattern=[1], **TWO_HEADS)
    ids = torch.randint(0, VOCAB, (1024,))
    assert largest(tiny_model(config, attn="eager"), ids, torch.tensor([0, 1024])) >= 2 * 1024 * 1024 * 4


# -- errors -----------------------------------------------------------------------------------------------------------

IDS = torch.zeros(2, 6, dtype=torch.int64)
STREAM = torch.zeros(6, dtype=torch.int64)
CU = torch.tensor([0, 2, 6])
SQUARE = torch.ones(2, 1, 6, 6, dtype=torch.bool)

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, "input_ids or inputs_embeds"),
    "thd of rank 3": ({"input_ids": IDS.unsqueeze(0), "cu_seqlens": CU}, r"\[T\] or \[1, T\]"),
    "thd embeddings of rank 4": ({"inputs_embeds": torch.zeros(1, 1, 6, 32), "cu_seqlens": CU}, r"\[T\] or \[1, T\]"),
    "thd with two rows": ({"input_ids": IDS, "cu_seqlens": CU}, "batch size 1, got 2"),
    "thd embeddings with two rows": ({"inputs_embeds": torch.zeros(2, 6, 32), "cu_seqlens": CU}, "batch size 1, got 2"),
    "thd without boundaries": ({"input_ids": STREAM, "qkv_format": "thd"}, "from make_cp_batch_for_te"),
    "two rows of boundaries": ({"input_ids": STREAM, "cu_seqlens": CU.expand(2, -1)}, "one row, got 2"),
    "two rows of padded boundaries": (
        {"input_ids": STREAM, "cu_seqlens": CU, "cu_seqlens_padded": CU.expand(2, -1)},
        "cu_seqlens_padded must be one row, got 2",
    ),
    "two rows beside padded boundaries": (
        {"input_ids": STREAM, "cu_seqlens": CU.expand(2, -1), "cu_seqlens_padded": CU},
        "cu_seqlens must be one row, got 2",
    ),
    "max_seqlen per document": (
        {"input_ids": STREAM, "cu_seqlens": CU, "max_seqlen": torch.tensor([2, 4])},
        "max_seqlen must be a scalar",
    ),
    "boundaries too short": ({"input_ids": STREAM, "cu_seqlens": torch.tensor([0, 5])}, "end at 5 .* 6 tokens"),
    "boundaries too long": ({"input_ids": STREAM, "cu_seqlens": torch.tensor([0, 7])}, "end at 7 .* 6 tokens"),
    "boundaries from 1": ({"input_ids": STREAM, "cu_seqlens": torch.tensor([1, 6])}, "start at 0"),
    "boundaries that fall": ({"input_ids": STREAM, "cu_seqlens": torch.tensor([0, 4, 3, 6])}, "decrease"),
    "boundaries only of sentinels": ({"input_ids": STREAM, "cu_seqlens": torch.tensor([-1000])}, "start at 0"),
    "positions of another length": (
        {"input_ids": STREAM, "cu_seqlens": CU, "position_ids": torch.arange(1)},
        r"position_ids has shape \[1\] .* 6 tokens",
    ),
    "padding mask of another length": (
        {"input_ids": STREAM, "cu_seqlens": CU, "padding_mask": torch.zeros(4, dtype=torch.bool)},
        r"padding_mask has shape \[4\] .* 6 tokens",
    ),
    "flat ids without boundaries": ({"input_ids": STREAM}, r"must be \[B, S\]"),
    "ids of rank 3": ({"input_ids": IDS.unsqueeze(0)}, r"must be \[B, S\]"),
    "embeddings of rank 2 without boundaries": ({"inputs_embeds": torch.zeros(6, 32)}, r"must be \[B, S\]"),
    "batch positions of another length": (
        {"input_ids": IDS, "position_ids": torch.arange(5)},
        r"position_ids has shape \[5\]",
    ),
    "batch positions of another batch": (
        {"input_ids": IDS, "position_ids": torch.zeros(3, 6, dtype=torch.int64)},
        r"position_ids has shape \[3, 6\]",
    ),
    "batch padding mask of one row": (
        {"input_ids": IDS, "padding_mask": torch.zeros(6, dtype=torch.bool), "attention_mask": torch.ones(2, 6)},
        r"padding_mask has shape \[6\]",
    ),
    "mask of another shape": ({"input_ids": IDS, "attention_mask": torch.ones(2, 5)}, r"\(2, 5\)"),
    "mask of rank 3": ({"input_ids": IDS, "attention_mask": torch.ones(2, 6, 6)}, "2-D or 4-D, got 3-D"),
    "4-D mask of another length": ({"input_ids": IDS, "attention_mask": SQUARE[..., :5]}, r"\(2, 1, 6, 5\)"),
    "4-D mask of another batch": (
        {"input_ids": IDS, "attention_mask": torch.ones(3, 1, 6, 6, dtype=torch.bool)},
        r"\(3, 1, 6, 6\)",
    ),
    "4-D mask of integers": ({"input_ids": IDS, "attention_mask": SQUARE.long()}, "4-D attention_mask is bool"),
    "unknown dictionary entry": ({"input_ids": IDS, "attention_mask": {"full": SQUARE}}, "unknown entry 'full'"),
    "incomplete dictionary": (
        {"input_ids": IDS, "attention_mask": {"full_attention": SQUARE}},
        "no 'sliding_attention'",
    ),
    "dictionary of 2-D masks": (
        {"input_ids": IDS, "attention_mask": {"full_attention": IDS + 1, "sliding_attention": IDS + 1}},
        "full_mask",
    ),
    "context parallel": ({"input_ids": STREAM, "cu_seqlens": CU, "cp_size": 2}, "cp_size is 2"),
    "pixels": ({"input_ids": IDS, "pixel_values": torch.zeros(4, 8)}, "non-empty vision_config"),
    "video": ({"input_ids": IDS, "pixel_values_videos": torch.zeros(4, 8)}, "non-empty vision_config"),
    "targets of another size": ({"input_ids": IDS, "targets": STREAM}, "targets"),
    "target outside the vocabulary": ({"input_ids": IDS, "targets": IDS + VOCAB}, f"target {VOCAB} .* vocabulary"),
}


@pytest.mark.parametrize("name", BAD)
def test_inputs_that_contradict_each_other(name: str) -> None:
    inputs, words = BAD[name]
    with pytest.raises(ValueError, match=words):
        tiny_model()(**inputs)


def test_unknown_keys_of_a_loader_are_ignored() -> None:
    model = tiny_model().eval()
    with torch.no_grad():
        plain = model(STREAM, cu_seqlens=CU).logits
        extra = model(STREAM, cu_seqlens=CU, seq_lens=CU, seq_lens_padded=CU, cp_rank=0, labels_from="x", max_seqlen=4)
    assert torch.equal(plain, extra.logits)


def test_both_moe_settings_are_refused() -> None:
    model = tiny_model()
    with pytest.raises(ConfigError, match="Cannot pass both moe_config and moe_overrides"):
        MiMoV2FlashForCausalLM(tiny_config(), model.model.moe_config, moe_overrides={"aux_loss_coeff": 0.1})
    assert issubclass(DataError, ValueError)
    with pytest.raises(TypeError, match="'surprise'"):
        MiMoV2FlashForCausalLM(tiny_config(), surprise=1)


def test_accessors() -> None:
    model = tiny_model()
    assert model.get_input_embeddings() is model.model.embed_tokens
    assert model.get_output_embeddings() is model.lm_head
    new = torch.nn.Embedding(VOCAB, 32)
    model.set_input_embeddings(new)
    assert model.model.embed_tokens is new
    head = type(model.lm_head)(32, VOCAB)
    model.set_output_embeddings(head)
    assert model.get_output_embeddings() is model.lm_head is head
