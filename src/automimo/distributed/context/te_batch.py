"""make_cp_batch_for_te: packed rows -> one stream of tokens (or one per pipeline chunk), and of that the share of a
context-parallel rank.

Legend: B rows, S places of a row, N chunks, T places of a chunk's stream (B * S / N), D documents, H hidden, R ranks.
"""

import importlib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from automimo.distributed.context.packed_input import CONSUMED, PackedStream, cumulative, read_packed
from automimo.distributed.context.partition import thd_partition
from automimo.errors import ConfigError

FILLER = -1000  # stands in rows of lengths where a row has fewer documents than others


def make_cp_batch_for_te(
    cp_mesh: DeviceMesh | None,
    batch: Mapping[str, Any],
    qkv_format: str = "thd",
    padding_token_id: int = 0,
    num_chunks: int = 1,
    seq_lens_padding_value: int = FILLER,
    return_local_indices: bool = False,
) -> Any:
    """A packed batch as the model takes it: flat streams and, with several context-parallel ranks, this rank's share.

    `batch` holds rows: input_ids [B, S] (or embeddings [B, S, H], also as `inputs_embeds`), labels or targets [B, S],
    position_ids [B, S] or, for mRoPE, [n, B, S] (missing: counted from the start of each document), seq_lens and
    seq_lens_padded [B, D] with `seq_lens_padding_value` as filler. The padded lengths of a row sum to S: unused space
    at its end belongs to its last document. Padding follows from the lengths, whatever padding_mask the batch has.

    A batch without lengths but with cu_seqlens, [T] or [1, T], is a stream already. If it has neither cu_seqlens_padded
    that differ nor a padding_mask, the places at the end of each document that hold `padding_token_id` are its padding.

    Returns a new dictionary (the tensors given are not changed):
      * token tensors as [T, ...], ids and labels as int64, mRoPE positions as [n, T]; `padding_mask` bool [T].
      * cu_seqlens int32 [D + 1] of the tokens, and cu_seqlens_padded of the places where it differs. Padding at the end
        of the stream alone counts as part of the last document. max_seqlen int32, the longest of cu_seqlens (CPU).
      * with R > 1 ranks in `cp_mesh` T / R of the T places, those of `thd_partition`; cu_seqlens are then the
        boundaries of the places of the *whole* stream, without cu_seqlens_padded; cp_size and cp_rank are added.
      * keys that are not named here, as they are. With `num_chunks` N > 1 they are left out.
    With N > 1 the rows are divided among N streams and everything has an axis of N in front (mRoPE [N, n, T]), shorter
    rows of cu_seqlens being filled up with `seq_lens_padding_value`.
    With `return_local_indices` the result is (batch, indices): int64 [T / R], the place of each token in the stream;
    None for N > 1.

    Raises KeyError without lengths, ConfigError (a ValueError) for what contradicts itself, with the numbers.
    """
    size, rank = place_in(cp_mesh)
    _check_request(batch, qkv_format, num_chunks)
    tokens, streams = read_packed(batch, num_chunks, seq_lens_padding_value, padding_token_id)
    device = next(iter(tokens.values())).device
    indices = None
    if size > 1:
        indices = torch.stack([_share(stream.boundaries(), size, rank, device) for stream in streams])
        tokens = {key: _select(values, indices) for key, values in tokens.items()}

    result = {} if num_chunks > 1 else {key: value for key, value in batch.items() if key not in CONSUMED}
    for key, values in tokens.items():
        shaped = values.movedim(2, 1) if key == "position_ids" and values.dim() == 3 else values
        result[key] = shaped if num_chunks > 1 else shaped.squeeze(0)
    result.update(_boundary_entries(streams, size, num_chunks, seq_lens_padding_value, device))
    result["qkv_format"] = "thd"
    if size > 1:
        result.update(cp_size=size, cp_rank=rank)
    if not return_local_indices:
        return result
    if num_chunks > 1:
        return result, None
    return result, torch.arange(sum(streams[0].padded), device=device) if indices is None else indices[0]


def place_in(mesh: DeviceMesh | None) -> tuple[int, int]:
    """Ranks of a mesh of one dimension and which of them we are; (1, 0) for none."""
    if mesh is None or mesh.size() <= 1:
        return 1, 0
    return mesh.size(), mesh.get_local_rank()


@cache
def check_rule_of_te(size: int, rank: int, device: torch.device) -> None:
    """Where Transformer Engine is installed, see whether it cuts a stream as `thd_partition` does; once per rank.

    Its attention takes tokens that were cut by its own rule. Raises ConfigError when that is another one.
    """
    try:
        importlib.import_module("transformer_engine.pytorch")  # loads the library that the next one needs
        te = importlib.import_module("transformer_engine_torch")
    except (ImportError, OSError):
        return
    boundaries = cumulative([2 * size * chunk for chunk in (1, 3, 2)])
    cu_seqlens = torch.tensor(boundaries, dtype=torch.int32, device=device)
    theirs = te.thd_get_partitioned_indices(cu_seqlens, boundaries[-1], size, rank).tolist()
    ours = thd_partition(boundaries, size, rank).tolist()
    if theirs != ours:
        raise ConfigError(
            f"Transformer Engine gives rank {rank} of {size} the tokens {theirs} of documents that end at "
            f"{boundaries[1:]}, AutoMiMo gives it {ours}: this version of Transformer Engine does not fit"
        )


def _check_request(batch: Mapping[str, Any], qkv_format: str, num_chunks: int) -> None:
    if qkv_format != "thd":
        raise ConfigError(f"qkv_format is {qkv_format!r}; only packed (thd) batches can be cut: pass qkv_format='thd'")
    given = batch.get("qkv_format", "thd")
    if given != "thd":
        raise ConfigError(f"the batch has qkv_format {given!r}; only packed (thd) batches can be cut")
    if num_chunks < 1:
        raise ConfigError(f"num_chunks must be at least 1, got {num_chunks}")
    if batch.get("cp_size", 1) > 1:
        raise ConfigError(f"the batch is already the share of rank {batch.get('cp_rank')} of {batch['cp_size']}")


def _share(boundaries: list[int], size: int, rank: int, device: torch.device) -> Tensor:
    if device.type == "cuda":
        check_rule_of_te(size, rank, device)
    return thd_partition(boundaries, size, rank).to(device)


def _select(values: Tensor, indices: Tensor) -> Tensor:
    """values [N, T, ...] at indices [N, T / R]."""
    return torch.stack([stream.index_select(0, own) for stream, own in zip(values, indices, strict=True)])


def _boundary_entries(
    streams: Sequence[PackedStream], size: int, chunks: int, filler: int, device: torch.device
) -> dict[str, Tensor]:
    """cu_seqlens, cu_seqlens_padded where it differs, max_seqlen."""
    if size > 1:
        streams = [PackedStream(stream.padded, stream.padded) for stream in streams]
    else:
        streams = [stream.tail_absorbed() for stream in streams]
    longest = torch.tensor([max(stream.lengths) for stream in streams], dtype=torch.int32)
    entries = {"cu_seqlens": _rows_of([cumulative(stream.lengths) for stream in streams], filler, device)}
    if any(stream.lengths != stream.padded for stream in streams):
        entries["cu_seqlens_padded"] = _rows_of([stream.boundaries() for stream in streams], filler, device)
    entries["max_seqlen"] = longest
    return entries if chunks > 1 else {key: value[0] for key, value in entries.items()}


def _rows_of(rows: Sequence[list[int]], filler: int, device: torch.device) -> Tensor:
    longest = max(map(len, rows))
    filled = [row + [filler] * (longest - len(row)) for row in rows]
    return torch.tensor(filled, dtype=torch.int32, device=device)
