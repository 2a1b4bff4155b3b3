"""ContextParallelSharder in one process: how it is made, which strategy it takes, shares and every error."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from cp_oracle import ROWS, FakeMesh, NamedMesh, share_of
from torch import Tensor, nn

from automimo.distributed.context import (
    ContextParallelSharder,
    ShardLayout,
    contiguous_indices,
    identity_indices,
    zigzag_indices,
)
from automimo.errors import ConfigError


def report(layout: ShardLayout | None, *args: Any, **kwargs: Any) -> Any:
    return nullcontext, {"given": args, **kwargs}, layout


def sharder(layout: ShardLayout | None, size: int = 2, rank: int = 0, **more: Any) -> ContextParallelSharder:
    made = ContextParallelSharder(device_mesh=NamedMesh(size, rank), shard_batch=partial(report, layout), **more)
    made.shard({})
    return made


def test_index_helpers_by_hand() -> None:
    assert contiguous_indices(6, 2, 1).tolist() == [3, 4, 5]
    assert zigzag_indices(8, 2, 0).tolist() == [0, 1, 6, 7]
    assert zigzag_indices(8, 2, 1).tolist() == [2, 3, 4, 5]
    assert identity_indices(3, 1, 0).tolist() == [0, 1, 2]
    for size in (2, 3, 4):
        for rank in range(size):
            assert zigzag_indices(24, size, rank).tolist() == share_of([24], size, rank)


def test_index_helpers_refuse_what_does_not_divide() -> None:
    with pytest.raises(ConfigError, match="7 tokens is not divisible by cp_size = 2"):
        contiguous_indices(7, 2, 0)
    with pytest.raises(ConfigError, match=r"6 tokens is not divisible by 2 \* cp_size = 4"):
        zigzag_indices(6, 2, 0)
    with pytest.raises(ConfigError, match=r"not on 2 \(this is rank 1"):
        identity_indices(8, 2, 1)


def test_the_two_modes_are_not_mixed() -> None:
    def strategy(*args: Any, **kwargs: Any) -> Any:
        return report(None, *args, **kwargs)

    for mixed in ({"model": nn.Linear(1, 1)}, {"batch": {}}, {"num_chunks": 2}):
        with pytest.raises(TypeError, match="there is one already"):
            ContextParallelSharder(shard_batch=strategy, **mixed)
    for lonely in ({"layout": ShardLayout()}, {"local_token_global_indices": zigzag_indices}):
        with pytest.raises(TypeError, match="belong to a strategy"):
            ContextParallelSharder(batch={}, **lonely)
    for nothing in ({}, {"model": nn.Linear(1, 1)}, {"device_mesh": NamedMesh(2)}):
        with pytest.raises(TypeError, match="or a batch"):
            ContextParallelSharder(**nothing)


def test_a_strategy_gets_the_meshes_and_settings() -> None:
    mask, batch = torch.ones(2), {"a": 1}
    made = ContextParallelSharder(
        device_mesh=NamedMesh(2), padding_token_id=7, loss_mask=mask, shard_batch=partial(report, None)
    )
    context, result = made.shard(batch)
    with context():
        pass
    cp_mesh, tp_mesh, given = result["given"]
    assert cp_mesh is made.cp_mesh
    assert cp_mesh.size() == 2
    assert tp_mesh is None
    assert given is batch
    assert result["padding_token_id"] == 7
    assert result["loss_mask"] is mask


def test_a_mesh_without_names() -> None:
    class Nameless(FakeMesh):
        mesh_dim_names = None

    with pytest.raises(ConfigError, match="'cp'"):
        ContextParallelSharder(device_mesh=Nameless(2), batch={})


class Model(nn.Module):
    def __init__(self, answer: dict[str, Any]) -> None:
        super().__init__()
        self.answer, self.asked = answer, []

    def prepare_model_inputs_for_cp(self, batch: dict[str, Any], num_chunks: int = 1) -> dict[str, Any]:
        self.asked.append((batch, num_chunks))
        return self.answer


def test_the_model_is_asked_first() -> None:
    batch = ROWS.batch()
    fixed = ShardLayout(torch.arange(4))
    own = ContextParallelSharder(
        shard_batch=partial(report, None), local_token_global_indices=zigzag_indices, layout=fixed
    )
    model = Model({"cp_sharder": own})
    made = ContextParallelSharder(model, NamedMesh(2), batch, num_chunks=3)
    assert model.asked == [(batch, 3)]
    assert made.shard_batch is own.shard_batch
    assert made.local_token_global_indices is zigzag_indices
    assert made.layout is fixed
    assert made.shard(batch)[1]["given"][0] is made.cp_mesh

    ContextParallelSharder(model, NamedMesh(2), batch, invoke_pre_embed=False)
    assert len(model.asked) == 1


@pytest.mark.parametrize("model", [None, nn.Linear(1, 1), Model({})], ids=["no model", "no hook", "no answer"])
@pytest.mark.parametrize("size", [1, 4])
def test_packed_batches_without_a_strategy_of_the_model(model: nn.Module | None, size: int) -> None:
    mesh = NamedMesh(size, size - 1)
    _, result = ContextParallelSharder(model, mesh, ROWS.batch()).shard(ROWS.batch())
    share = share_of(ROWS.places(0, 1), size, size - 1) if size > 1 else list(range(96))
    assert result["labels"].tolist() == [ROWS.stream("labels", 0, 1)[place] for place in share]


def test_packed_layout_and_row_shaped_tensors() -> None:
    made = ContextParallelSharder(None, NamedMesh(4, 1), ROWS.batch())
    with pytest.raises(NotImplementedError, match=r"call shard\(batch\) first"):
        made.shard_token_tensor(torch.zeros(4, 24))
    with pytest.raises(NotImplementedError, match=r"call shard\(batch\) first"):
        made.gather_token_tensor(torch.zeros(24), seq_dim=0)
    _, result = made.shard(ROWS.batch())
    assert made.layout is not None
    assert made.layout.input_row_shape == (4, 24)
    assert made.layout.padded_seq_len == 96
    labels = ROWS.table("labels")
    assert torch.equal(made.shard_token_tensor(labels), result["labels"])
    assert torch.equal(made.shard_token_tensor(labels.view(1, 96)), result["labels"].unsqueeze(0))
    assert torch.equal(made.shard_token_tensor(labels.view(96), seq_dim=0), result["labels"])
    wide = torch.stack([labels, -labels], 1).transpose(0, 1)  # [2, 4, 24]
    assert torch.equal(made.shard_token_tensor(wide, seq_dim=-1), torch.stack([result["labels"], -result["labels"]]))
    with pytest.raises(ConfigError, match="95 tokens along dimension 0; expected 96"):
        made.shard_token_tensor(torch.zeros(95), seq_dim=0)
    with pytest.raises(ConfigError, match="25 tokens along dimension 0, but this rank has 24"):
        made.gather_token_tensor(torch.zeros(25), seq_dim=0)
    with pytest.raises(ConfigError, match=r"shape \[96\] has no dimension 1"):
        made.shard_token_tensor(torch.zeros(96))


def test_several_chunks_have_no_layout() -> None:
    made = ContextParallelSharder(None, NamedMesh(2), ROWS.batch(), num_chunks=2)
    _, result = made.shard(ROWS.batch())
    assert result["input_ids"].shape == (2, 24)
    assert made.layout is None
    with pytest.raises(NotImplementedError, match="several chunks"):
        made.shard_token_tensor(torch.zeros(96), seq_dim=0)


def test_the_layout_is_that_of_the_last_batch() -> None:
    layouts = [ShardLayout(torch.tensor([0, 3])), ShardLayout(torch.tensor([1, 2])), None]
    made = ContextParallelSharder(
        device_mesh=NamedMesh(2), shard_batch=lambda *_, **__: (nullcontext, {}, layouts.pop(0))
    )
    for expected in ([0, 3], [1, 2]):
        made.shard({})
        assert made.shard_token_tensor(torch.arange(4), seq_dim=0).tolist() == expected
    made.shard({})
    with pytest.raises(NotImplementedError):
        made.shard_token_tensor(torch.arange(4), seq_dim=0)


def test_a_loss_mask_is_not_for_packed_batches() -> None:
    made = ContextParallelSharder(None, NamedMesh(2), ROWS.batch(), loss_mask=torch.ones(4, 24))
    with pytest.raises(ConfigError, match="loss mask in the labels"):
        made.shard(ROWS.batch())


@pytest.mark.parametrize("mesh", [None, NamedMesh(1)])
def test_one_rank_keeps_an_unpacked_batch_whole(mesh: Any) -> None:
    model = Model({})
    batch = {"input_ids": torch.arange(6).view(2, 3)}
    made = ContextParallelSharder(model, mesh, batch)
    context, result = made.shard(batch)
    with context():
        assert result == batch
        assert result is not batch
    assert not model.asked
    x = torch.randn(2, 3, 5)
    assert torch.equal(made.shard_token_tensor(x), x)
    assert torch.equal(made.gather_token_tensor(x), x)


def test_several_ranks_do_not_share_an_unpacked_batch() -> None:
    for batch in ({"input_ids": torch.zeros(2, 8)}, {"qkv_format": "bshd"}):
        for model in (None, Model({})):
            with pytest.raises(ConfigError, match=r"2 context-parallel ranks .*packing_strategy thd.*ring") as error:
                ContextParallelSharder(model, NamedMesh(2), batch)
            assert repr(batch.get("qkv_format")) in str(error.value)


def test_an_answer_that_is_not_understood() -> None:
    with pytest.raises(ConfigError, match=r"inputs_embeds.*only 'cp_sharder'"):
        ContextParallelSharder(Model({"inputs_embeds": 1}), NamedMesh(2), ROWS.batch())


def test_cuts_that_follow_from_the_length() -> None:
    made = sharder(None, 4, 2, local_token_global_indices=zigzag_indices)
    x = torch.arange(32).view(2, 16)
    assert made.shard_token_tensor(x).tolist() == [[4, 5, 10, 11], [20, 21, 26, 27]]
    assert made.shard_token_tensor(x.T, seq_dim=0).tolist() == [[4, 20], [5, 21], [10, 26], [11, 27]]
    with pytest.raises(ConfigError, match="12 tokens"):
        made.shard_token_tensor(torch.zeros(2, 12))
    with pytest.raises(NotImplementedError, match="trim needs a layout"):
        made.gather_token_tensor(torch.zeros(2, 4), trim=True)


def test_a_length_that_was_padded_needs_fill() -> None:
    made = sharder(ShardLayout(torch.tensor([0, 1, 6, 7]), original_seq_len=6, padded_seq_len=8))
    x = torch.arange(1.0, 7.0, requires_grad=True)
    with pytest.raises(ConfigError, match="2 of the 8 places of the stream have no value: pass fill"):
        made.shard_token_tensor(x, seq_dim=0)
    share = made.shard_token_tensor(x, seq_dim=0, fill=-5.0)
    assert share.tolist() == [1, 2, -5, -5]
    share.sum().backward()
    assert x.grad.tolist() == [1, 1, 0, 0, 0, 0]
    assert made.shard_token_tensor(torch.arange(8), seq_dim=0).tolist() == [0, 1, 6, 7]
    flags = made.shard_token_tensor(torch.zeros(1, 6, dtype=torch.bool), fill=True)
    assert flags.tolist() == [[False, False, True, True]]
    with pytest.raises(ConfigError, match="7 tokens along dimension 0; expected 8 or 6"):
        made.shard_token_tensor(torch.zeros(7), seq_dim=0)


def test_tokens_that_were_put_elsewhere() -> None:
    # Two rows of three, the last token of the first row is left out, and a gap is behind the first document.
    positions = torch.tensor([0, 1, -1, 4, 5, 6])
    layout = ShardLayout(torch.tensor([0, 1, 6, 7]), input_row_shape=(2, 3), input_token_stream_positions=positions)
    made = sharder(layout)
    rows = torch.arange(1, 7).view(2, 3)
    with pytest.raises(ConfigError, match="3 of the 8 places"):
        made.shard_token_tensor(rows)
    assert made.shard_token_tensor(rows, fill=0).tolist() == [1, 2, 6, 0]

    alone = sharder(
        ShardLayout(torch.arange(8), input_row_shape=(2, 3), input_token_stream_positions=positions), size=1
    )
    whole = alone.shard_token_tensor(rows, fill=0)
    assert whole.tolist() == [1, 2, 0, 0, 4, 5, 6, 0]
    assert alone.gather_token_tensor(whole, seq_dim=0).tolist() == whole.tolist()
    with pytest.raises(ConfigError, match="1 of the 6 tokens of the input have no value"):
        alone.gather_token_tensor(whole, seq_dim=0, trim=True)
    assert alone.gather_token_tensor(whole, seq_dim=0, trim=True, fill=-1).tolist() == [[1, 2, -1], [4, 5, 6]]


def test_trimming() -> None:
    alone = sharder(ShardLayout(torch.arange(8), original_seq_len=5, padded_seq_len=8), size=1)
    assert alone.gather_token_tensor(torch.arange(8), seq_dim=0, trim=True).tolist() == [0, 1, 2, 3, 4]
    assert alone.gather_token_tensor(torch.arange(8), seq_dim=0).tolist() == list(range(8))
    plain = sharder(ShardLayout(torch.arange(8)), size=1)
    with pytest.raises(NotImplementedError, match="has neither"):
        plain.gather_token_tensor(torch.arange(8), seq_dim=0, trim=True)
    wrong = sharder(ShardLayout(torch.arange(8), input_row_shape=(2, 3)), size=1)
    with pytest.raises(ConfigError, match=r"8 tokens are not the rows \[2, 3\]"):
        wrong.gather_token_tensor(torch.arange(8), seq_dim=0, trim=True)


def test_layouts_that_contradict_themselves() -> None:
    made = sharder(ShardLayout(torch.arange(3), padded_seq_len=8))
    with pytest.raises(ConfigError, match=r"3 tokens on each of 2 ranks, but a stream of 8"):
        made.shard_token_tensor(torch.zeros(8), seq_dim=0)
    twice = sharder(ShardLayout(torch.tensor([0, 0, 2])), size=1)
    with pytest.raises(ConfigError, match="not exactly the 3 places"):
        twice.gather_token_tensor(torch.zeros(3), seq_dim=0)


def test_the_order_of_a_share_is_kept() -> None:
    order = torch.tensor([2, 0, 3, 1])
    alone = sharder(ShardLayout(order), size=1)
    x: Tensor = torch.randn(2, 4, 3, requires_grad=True)
    share = alone.shard_token_tensor(x)
    assert torch.equal(share, x[:, order])
    back = alone.gather_token_tensor(share)
    assert torch.equal(back, x)
    weight = torch.randn(2, 4, 3)
    (back * weight).sum().backward()
    assert torch.equal(x.grad, weight)
