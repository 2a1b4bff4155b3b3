"""Every accepted input form gives what the documents give one by one: logits, gradients and expert counts."""

from collections.abc import Callable
from functools import cache
from itertools import pairwise, product
from typing import Any, NamedTuple

import pytest
import torch
from tiny_text import VOCAB, WINDOW, assert_same_gradients, gradients, relative, tiny_config, tiny_model
from torch import Tensor

from automimo.attention import DocumentLayout
from automimo.mimo_v2_flash.stream import batch_stream
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


# -- documents from a mask --------------------------------------------------------------------------------------------


def expected_documents(mask: list[list[int]]) -> list[list[int]] | None:
    """Places of each document in the flattened batch, or None when one of them has a hole."""
    width = len(mask[0])
    found = []
    for r, row in enumerate(mask):
        for number in dict.fromkeys(value for value in row if value):
            columns = [c for c, value in enumerate(row) if value == number]
            if columns != list(range(columns[0], columns[-1] + 1)):
                return None
            found.append([r * width + c for c in columns])
    return found


def test_documents_of_every_small_mask() -> None:
    """All masks of one row of 5 and of two rows of 3 with the numbers 0, 1 and 2."""
    masks = [[list(row)] for row in product((0, 1, 2), repeat=5)]
    masks += [[list(flat[:3]), list(flat[3:])] for flat in product((0, 1, 2), repeat=6)]
    for mask in masks:
        tensor = torch.tensor(mask)
        full = torch.ones(*tensor.shape, tensor.shape[1], dtype=torch.bool).unsqueeze(1)
        dense = {"full_attention": full, "sliding_attention": full}
        ids = torch.arange(tensor.numel()).view(tensor.shape)
        stream = batch_stream(ids, None, tensor, None, 2, lambda dense=dense: dense)
        documents = expected_documents(mask)
        real = tensor.flatten().nonzero().flatten().tolist()
        if documents is None:
            assert not isinstance(stream.layout, DocumentLayout), mask
            assert stream.routed is None if len(real) == tensor.numel() else stream.routed.tolist() == real, mask
            continue
        assert isinstance(stream.layout, DocumentLayout), mask
        assert stream.routed is None, mask
        assert stream.tokens.tolist() == real, mask
        assert stream.position_ids.tolist() == [place % tensor.shape[1] for place in real], mask
        cuts = stream.layout.cu_seqlens.tolist()
        assert [stream.tokens[a:b].tolist() for a, b in pairwise(cuts)] == documents, mask


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


# -- hidden states ----------------------------------------------------------------------------------------------------


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
