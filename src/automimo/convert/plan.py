"""What a conversion will write, decided from headers alone: which tensor, from where, in which form and file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from automimo import __version__
from automimo.checkpoint import CheckpointReader
from automimo.checkpoint.ledger import group_keys
from automimo.checkpoint.parallel_writer import Unit, plan_files
from automimo.checkpoint.writer import MAX_SHARD_BYTES
from automimo.convert.config_json import converted_config
from automimo.errors import CheckpointError
from automimo.mimo_v2_flash.source import config_values
from automimo.mimo_v2_flash.storage import (
    SourceOptions,
    StoredCheckpoint,
    StoredMatrix,
    stored_together,
    target_form,
    target_matrices,
)
from automimo.mimo_v2_flash.storage.consistency import key_problems, mtp_layers
from automimo.mimo_v2_flash.storage.key_table import text_shapes
from automimo.mimo_v2_flash.storage.stored_checkpoint import FLOATING
from automimo.mimo_v2_flash.storage.transfer import Tally, raw_unit, tensor_unit, transfer_units
from automimo.quantization import Strip

Target = Literal["bf16", "fp8", "mxfp4"]


@dataclass(frozen=True)
class ConvertOptions:
    """What to make. `to` with `layout` and `tp` (None: see `target_form`), or the form of a reference checkpoint.

    `source` and `reference` say about the two what their files do not.
    """

    to: Target | None = None
    layout: Literal["split", "fused"] | None = None
    tp: int | None = None
    source: SourceOptions = field(default_factory=SourceOptions)
    reference: SourceOptions = field(default_factory=SourceOptions)
    max_shard_bytes: int = MAX_SHARD_BYTES


@dataclass(frozen=True)
class Conversion:
    """A plan. `units` write the tensors of `files` (name -> keys).

    `targets` say how the tensors of the split layout that come from the source are stored, `borrowed` are those that
    only the reference has, `raw` those that nobody interprets (key -> checkpoint that they come from). `side` is the
    folder that the side files come from, `warnings` are what a user should know before trusting the result.
    """

    source: StoredCheckpoint
    reference: StoredCheckpoint | None
    targets: Mapping[str, StoredMatrix]
    borrowed: Mapping[str, StoredMatrix]
    raw: Mapping[str, CheckpointReader]
    units: Sequence[Unit]
    files: Mapping[str, Sequence[str]]
    metadata: Mapping[str, Any]
    config: Mapping[str, Any]
    side: Path
    tally: Tally
    warnings: Sequence[str]

    @property
    def read_bytes(self) -> int:
        return sum(unit.source_bytes for unit in self.units)

    @property
    def written_bytes(self) -> int:
        return sum(unit.nbytes for unit in self.units)

    def file_marks(self) -> list[Any]:
        """Size and time of all files that are read; they must not change while the conversion runs."""
        readers = [self.source.reader, *([self.reference.reader] if self.reference is not None else [])]
        return [_file_marks(reader) for reader in readers]

    def fingerprint(self) -> str:
        """Changes with everything that decides a byte of the output: plan, sources (with size and time), version."""
        forms = _Forms()
        told = {
            "version": __version__,
            "targets": [forms.of(matrix) for matrix in (*self.targets.values(), *self.borrowed.values())],
            "sources": [forms.of(matrix) for matrix in self.source.matrices.values()],
            "raw": sorted(self.raw),
            "files": {name: list(keys) for name, keys in self.files.items()},
            "metadata": dict(self.metadata),
            "config": dict(self.config),
            "read": self.file_marks(),
            "tensors": _places(self.source.reader),
        }
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


class _Forms:
    """What a fingerprint says of a matrix. Grids are spelled out once each: thousands of experts share one, and all of
    them in full took ten seconds for V2.5."""

    def __init__(self) -> None:
        self._grids: dict[tuple[Strip, ...], int] = {}

    def of(self, matrix: StoredMatrix) -> list[Any]:
        new = matrix.strips not in self._grids
        number = self._grids.setdefault(matrix.strips, len(self._grids))
        grid = [(s.row, s.rows, s.scale_row) for s in matrix.strips] if new else []
        stored = [(tensor.key, tensor.dtype, tensor.shape) for tensor in matrix.stored]
        return [matrix.key, matrix.encoding, stored, matrix.rows, number, grid]


def plan_conversion(
    source: StoredCheckpoint, options: ConvertOptions, reference: StoredCheckpoint | None = None
) -> Conversion:
    """Plan the conversion of `source` to `options.to`, or to the form of `reference`.

    Raises CheckpointError, with the keys, when something of the source would be lost or cannot be stored in the form.
    """
    return _plan_like(source, reference) if reference is not None else _plan_to(source, options)


def _plan_to(source: StoredCheckpoint, options: ConvertOptions) -> Conversion:
    assert options.to is not None
    quantisation = "none" if options.to == "bf16" else options.to
    form = target_form(
        source.config, quantisation, layout=options.layout, tp=options.tp, v_scales=options.source.v_scales
    )
    shapes = {key: matrix.shape for key, matrix in source.matrices.items()}
    dtypes = {key: matrix.weight.dtype for key, matrix in source.matrices.items()}
    known = text_shapes(source.config, mtp_layers(source.reader.tensors))
    targets = target_matrices(shapes, dtypes, source.config, form)
    for key, matrix in source.matrices.items():
        if key not in known and matrix.encoding == "plain":
            targets[key] = matrix  # nobody knows what it is: it stays as it is
    tally = Tally()
    units = transfer_units(source, targets, tally)
    units += [tensor_unit(source.reader, key, tally) for key in source.raw]
    metadata = {key: value for key, value in source.reader.metadata.items() if key not in ("total_size", "tp_size")}
    if form.layout == "fused":
        metadata["tp_size"] = form.tp
    return Conversion(
        source,
        None,
        targets,
        {},
        dict.fromkeys(source.raw, source.reader),
        units,
        plan_files(units, options.max_shard_bytes, index=bool(metadata)),
        metadata,
        converted_config(config_values(source.reader.folder), source.config, form),
        source.reader.folder,
        tally,
        _key_warnings(source),
    )


def _plan_like(source: StoredCheckpoint, reference: StoredCheckpoint) -> Conversion:
    folder = reference.reader.folder
    _check_same_model(source, reference)
    targets: dict[str, StoredMatrix] = {}
    borrowed: dict[str, StoredMatrix] = {}
    tally = Tally()
    units = []
    for group in stored_together(reference.matrices.values()):
        here = [matrix.key for matrix in group if matrix.key in source.matrices]
        if here and len(here) < len(group):
            absent = next(matrix.key for matrix in group if matrix.key not in source.matrices)
            raise CheckpointError(
                f"{source.reader.folder}: has {here[0]} but not {absent}, stored together in {folder}"
            )
        (targets if here else borrowed).update((matrix.key, matrix) for matrix in group)
        if not here:
            units.append(raw_unit(reference.reader, group, tally, "borrowed"))
    units += transfer_units(source, targets, tally, reference)
    raw: dict[str, CheckpointReader] = {}
    own = set(source.raw)
    for key in reference.raw:
        raw[key] = source.reader if key in own else reference.reader
        units.append(tensor_unit(raw[key], key, tally, reference.reader.tensors[key].dtype))
    files: dict[str, list[str]] = {}
    for key, info in reference.reader.tensors.items():
        files.setdefault(info.file.name, []).append(key)
    metadata = {key: value for key, value in reference.reader.metadata.items() if key != "total_size"}
    tp = reference.description.tp
    if tp is not None and tp.found_by.startswith("--"):
        metadata["tp_size"] = tp.size  # nothing in the reference tells it; the result does
    return Conversion(
        source,
        reference,
        targets,
        borrowed,
        raw,
        units,
        files,
        metadata,
        config_values(folder),
        folder,
        tally,
        _borrowed_warnings([*borrowed, *(key for key, reader in raw.items() if reader is reference.reader)]),
    )


def _key_warnings(source: StoredCheckpoint) -> list[str]:
    """Keys that a model of this config lacks or does not know; `inspect` calls them problems."""
    found = key_problems(source.reader, source.config, source.description)
    kinds: dict[str, list[str]] = {}
    for what, key in found:
        kinds.setdefault(what, []).append(key)
    return [f"{len(keys)} x {what}: {_folded(keys)}" for what, keys in kinds.items()]


def _borrowed_warnings(keys: Sequence[str]) -> list[str]:
    return [f"{len(keys)} tensors that only the reference has come from it: {_folded(keys)}"] if keys else []


def _folded(keys: Sequence[str]) -> str:
    groups = group_keys(key for key in keys if key)
    more = f" and {len(groups) - 6} more groups" if len(groups) > 6 else ""
    return f"{', '.join(groups[:6])}{more}" if groups else "config.json"


# What a fine-tune must have in common with the release that it goes back to, besides keys and shapes.
_SAME_CONFIG = (
    *("rms_norm_eps", "rope_theta", "swa_rope_theta", "partial_rotary_factor", "attention_value_scale"),
    *("sliding_window", "layer_types", "mlp_layer_types", "num_attention_heads", "num_key_value_heads"),
    *("swa_num_attention_heads", "swa_num_key_value_heads", "num_experts_per_tok", "n_group", "topk_group"),
    *("scoring_func", "norm_topk_prob", "routed_scaling_factor"),
)


def _check_same_model(source: StoredCheckpoint, reference: StoredCheckpoint) -> None:
    """The reference must be the same model and have every tensor of the source, in its shape: its config.json is taken,
    and nothing is dropped silently."""
    where = f"{source.reader.folder} does not fit the reference {reference.reader.folder}"
    mine, its = source.config.to_dict(), reference.config.to_dict()
    differing = [f"{key} is {mine[key]}, in the reference {its[key]}" for key in _SAME_CONFIG if mine[key] != its[key]]
    if differing:
        raise CheckpointError(f"{where}: config.json: {'; '.join(differing)}. Correct the one that is wrong")
    raw, known = set(source.raw), set(reference.raw)
    lost = [key for key in source.matrices if key not in reference.matrices] + sorted(raw - known)
    if lost:
        names = "\n".join(f"    {group}" for group in group_keys(lost)[:8])
        raise CheckpointError(f"{where}: {len(lost)} tensors of it are not in the reference and would be lost\n{names}")
    ours, theirs = source.reader.tensors, reference.reader.tensors
    shapes = [
        *((k, m.shape, reference.matrices[k].shape) for k, m in source.matrices.items()),
        *((k, ours[k].shape, theirs[k].shape) for k in sorted(raw)),
    ]
    for key, found, expected in shapes:
        if found != expected:
            raise CheckpointError(f"{where}: {key} is {list(found)}, in the reference {list(expected)}")
    for key in sorted(raw):
        pair = (ours[key].dtype, theirs[key].dtype)
        if pair[0] != pair[1] and not (pair[0] in FLOATING and pair[1] in FLOATING):
            raise CheckpointError(f"{where}: {key} is stored as {pair[0]}, in the reference as {pair[1]}")


def _file_marks(reader: CheckpointReader) -> list[Any]:
    stats = {name: (reader.folder / name).stat() for name in reader.files}
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()]


def _places(reader: CheckpointReader) -> list[Any]:
    return [(key, i.dtype, list(i.shape), i.file.name, i.begin) for key, i in reader.tensors.items()]
