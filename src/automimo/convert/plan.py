"""What a conversion will write, decided from headers alone: which tensor, from where, in which form and file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from automimo import __version__
from automimo.checkpoint import CheckpointReader
from automimo.checkpoint.ledger import group_keys
from automimo.checkpoint.parallel_writer import Unit, plan_files
from automimo.checkpoint.safetensors_file import TORCH_DTYPES
from automimo.checkpoint.writer import MAX_SHARD_BYTES, PlannedTensor
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
from automimo.mimo_v2_flash.storage.stored_checkpoint import FLOATING
from automimo.mimo_v2_flash.storage.transfer import Tally, cast_unit, raw_unit, transfer_units
from automimo.quantization import Strip

Target = Literal["bf16", "fp8", "mxfp4"]


@dataclass(frozen=True)
class ConvertOptions:
    """What to make. `to` with `layout` and `tp` (None: see `target_form`), or the form of a reference checkpoint.

    `source` says about the source what its files do not.
    """

    to: Target | None = None
    layout: Literal["split", "fused"] | None = None
    tp: int | None = None
    source: SourceOptions = field(default_factory=SourceOptions)
    max_shard_bytes: int = MAX_SHARD_BYTES


@dataclass(frozen=True)
class Conversion:
    """A plan. `units` write the tensors of `files` (name -> keys).

    `targets` say how the tensors of the split layout that come from the source are stored, `borrowed` are those that
    only the reference has, `raw` those that nobody interprets (key -> checkpoint that they come from). `side` is the
    folder that the side files come from.
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

    @property
    def read_bytes(self) -> int:
        return sum(unit.source_bytes for unit in self.units)

    @property
    def written_bytes(self) -> int:
        return sum(unit.nbytes for unit in self.units)

    def fingerprint(self) -> str:
        """Changes with everything that decides a byte of the output: plan, sources (with size and time), version."""
        readers = [self.source.reader, *([self.reference.reader] if self.reference is not None else [])]
        forms = _Forms()
        told = {
            "version": __version__,
            "targets": [forms.of(matrix) for matrix in (*self.targets.values(), *self.borrowed.values())],
            "sources": [forms.of(matrix) for matrix in self.source.matrices.values()],
            "raw": sorted(self.raw),
            "files": {name: list(keys) for name, keys in self.files.items()},
            "metadata": dict(self.metadata),
            "config": dict(self.config),
            "read": [_file_marks(reader) for reader in readers],
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
    targets = target_matrices(shapes, dtypes, source.config, form)
    tally = Tally()
    units = transfer_units(source, targets, tally)
    units += [_raw_tensor(source.reader, key, tally) for key in source.raw]
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
            units.append(raw_unit(reference.reader, group, tally))
    units += transfer_units(source, targets, tally, reference)
    raw: dict[str, CheckpointReader] = {}
    mine = set(source.raw)
    for key in reference.raw:
        raw[key] = source.reader if key in mine else reference.reader
        units.append(_raw_tensor(raw[key], key, tally, reference.reader.tensors[key].dtype))
    files: dict[str, list[str]] = {}
    for key, info in reference.reader.tensors.items():
        files.setdefault(info.file.name, []).append(key)
    metadata = {key: value for key, value in reference.reader.metadata.items() if key != "total_size"}
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
    )


def _check_same_model(source: StoredCheckpoint, reference: StoredCheckpoint) -> None:
    """The reference must have every tensor of the source, in the same shape: nothing is dropped silently."""
    where = f"{source.reader.folder} does not fit the reference {reference.reader.folder}"
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


def _raw_tensor(reader: CheckpointReader, key: str, tally: Tally, dtype: str | None = None) -> Unit:
    """A unit for a tensor that nobody interprets: its bytes, or cast where the reference has another dtype."""
    info = reader.info(key)
    if dtype is not None and dtype != info.dtype:
        return cast_unit(reader, info, TORCH_DTYPES[dtype], tally)
    planned = PlannedTensor(key, info.dtype, info.shape)
    return Unit((planned,), partial(_bytes_of, reader, key, tally), info.nbytes)


def _bytes_of(reader: CheckpointReader, key: str, tally: Tally) -> list[Any]:
    tally.add("copied", 1)
    return [reader.iter_bytes(key)]


def _file_marks(reader: CheckpointReader) -> list[Any]:
    """Name, size and time of every weight file, and every tensor's place in it."""
    stats = {name: (reader.folder / name).stat() for name in reader.files}
    files = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()]
    return [files, [(key, i.dtype, list(i.shape), i.file.name, i.begin) for key, i in reader.tensors.items()]]
