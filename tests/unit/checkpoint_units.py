"""Units of tensors for the parallel writer, folders for `work_folder`, and what a test looks at in them."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from automimo.checkpoint import PlannedTensor, Unit, dtype_name, work_folder

INDEX = "model.safetensors.index.json"


def planned(key: str, tensor: torch.Tensor) -> PlannedTensor:
    return PlannedTensor(key, dtype_name(tensor.dtype), tuple(tensor.shape))


def unit_of(tensors: dict[str, torch.Tensor], produce: Callable[[], Sequence[Any]] | None = None) -> Unit:
    plans = tuple(planned(key, tensor) for key, tensor in tensors.items())
    return Unit(plans, produce or (lambda: list(tensors.values())), sum(plan.nbytes for plan in plans))


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def inodes(folder: Path) -> dict[str, tuple[int, int]]:
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.glob("*.safetensors")}


def sample(count: int = 24) -> list[dict[str, torch.Tensor]]:
    """Groups of tensors: several dtypes, a scalar, tensors without elements, strides that are not contiguous."""
    generator = torch.Generator().manual_seed(0)
    groups = []
    for i in range(count):
        weight = torch.randn(5 + i, 7, generator=generator).bfloat16()
        group = {f"{i}.weight": weight.T if i % 3 else weight, f"{i}.scale": torch.randn(3, generator=generator)}
        if i % 5 == 0:
            group[f"{i}.empty"] = torch.zeros(0, 3)
            group[f"{i}.scalar"] = torch.tensor(i)
        groups.append(group)
    return groups


def merged(groups: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {key: tensor for group in groups for key, tensor in group.items()}


def good(count: int = 5) -> list[Unit]:
    return [unit_of({f"good{i}": torch.ones(4)}) for i in range(count)]


# Of child processes: as quiet as the tests themselves.
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def finish_file(folder: Path, name: str, text: str) -> None:
    """As the parallel writer does: under a temporary name first."""
    partial = folder / f".{name}.partial"
    partial.write_text(text)
    partial.rename(folder / name)


def write_folder(final: Path, fingerprint: str = "from x", text: str = "new") -> list[str]:
    """Write three weight files and side files; returns the names of the weight files that were there already."""
    with work_folder(final, fingerprint) as folder:
        kept = names_in(folder)
        for name in ("a.safetensors", "b.safetensors", "c.safetensors"):
            if name not in kept:
                finish_file(folder, name, text)
        (folder / "sub").mkdir()
        for name in ("config.json", "sub/d.safetensors"):
            assert not (folder / name).exists()
            (folder / name).write_text(text)
    return kept


def content(folder: Path) -> str:
    """The text that all files hold: fails when the folder is incomplete, mixed, or has more in it."""
    files = ["a.safetensors", "b.safetensors", "c.safetensors", "config.json", "sub", "sub/d.safetensors"]
    assert sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*")) == files
    texts = {path.read_text() for path in folder.rglob("*") if path.is_file()}
    assert len(texts) == 1
    return texts.pop()
