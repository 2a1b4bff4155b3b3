"""What this installation can do on this machine: versions, resources, features, and a check that it computes correctly.

A check that fails makes the installation unusable and the exit code 1; what is merely missing costs speed or a feature.
"""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

from automimo import __version__
from automimo.attention import attend, available_backends, build_layout
from automimo.machine import GIB, memory_bytes
from automimo.moe.experts import expert_mlp

State = Literal["ok", "missing", "failed"]
# Random fp32 problems of a few hundred tokens: both sides of a self check round differently, but by no more than this
# share of the reference's norm (observed 1e-7 to 4e-7).
SELF_CHECK_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Finding:
    """One line of the table. `failed` means that AutoMiMo does not work here; `missing` that it works without it."""

    group: str
    name: str
    value: str
    state: State = "ok"


def run_doctor(console: Console | None = None) -> int:
    """Print the table and return 0, or 1 when something that AutoMiMo needs is absent or wrong."""
    console = console or Console(highlight=False)
    findings = list(examine())
    console.print(_table(findings, console))
    failed = [finding for finding in findings if finding.state == "failed"]
    for finding in failed:
        console.print(f"failed: {finding.name}: {finding.value}", style="red", markup=False, soft_wrap=True)
    if not failed:
        console.print("Everything that AutoMiMo needs works here.", style="green")
    return 1 if failed else 0


def examine() -> Iterator[Finding]:
    """All findings, in the order of the table."""
    yield from _versions()
    yield from _machine()
    yield from _features()
    yield from _self_checks()


def _table(findings: list[Finding], console: Console) -> Table:
    marks = {"ok": ("ok", "green"), "missing": ("-", "yellow"), "failed": ("FAILED", "bold red")}
    table = Table(box=None, pad_edge=False, show_header=False, expand=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=console.width >= 60)
    table.add_column(overflow="fold")
    group = ""
    for finding in findings:
        if finding.group != group:
            table.add_row("", f"[bold]{finding.group}[/bold]", "")
            group = finding.group
        mark, style = marks[finding.state]
        table.add_row(f"[{style}]{mark}[/{style}]", finding.name, finding.value.replace("[", "\\["))
    return table


def _versions() -> Iterator[Finding]:
    group = "versions"
    yield Finding(group, "python", platform.python_version())
    yield Finding(group, "automimo", __version__)
    for text in importlib.metadata.requires("automimo") or []:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        yield check_version(requirement)


def check_version(requirement: Requirement) -> Finding:
    """Whether an installed package satisfies a requirement; pre-releases and local versions (+cpu) count."""
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return Finding("versions", requirement.name, f"not installed; needs {requirement}", "failed")
    if not requirement.specifier.contains(version, prereleases=True):
        return Finding("versions", requirement.name, f"{version}; needs {requirement.specifier}", "failed")
    return Finding("versions", requirement.name, version)


def _machine() -> Iterator[Finding]:
    group = "machine"
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # Linux only; elsewhere a process may use every core
        cores = os.cpu_count() or 1
    omp = os.environ.get("OMP_NUM_THREADS")
    threads = f"{torch.get_num_threads()} threads on {cores} cores" + (f" (OMP_NUM_THREADS={omp})" if omp else "")
    yield Finding(group, "cpu", f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {threads}")
    memory = memory_bytes()
    if memory is not None:
        yield Finding(group, "memory", f"{memory.total / GIB:.1f} GiB, {memory.available / GIB:.1f} GiB free")
    disk = shutil.disk_usage(Path.cwd())
    yield Finding(group, "disk", f"{disk.total / GIB:.1f} GiB, {disk.free / GIB:.1f} GiB free in this folder")
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(i)
            value = f"{properties.name}, {properties.total_memory / GIB:.0f} GiB, CUDA {torch.version.cuda}"
            yield Finding(group, f"gpu {i}", value)
    else:
        yield Finding(group, "gpu", "none that torch can use; everything runs on the CPU", "missing")


def _features() -> Iterator[Finding]:
    group = "features"
    yield Finding(group, "attention", ", ".join(available_backends()))
    flex = "needs CUDA to train" if not torch.cuda.is_available() else "not part of this version"
    yield Finding(group, "attention flex", flex, "missing")
    if importlib.util.find_spec("transformer_engine") is None:
        yield Finding(group, "attention te", "transformer_engine is not installed", "missing")
    else:
        yield Finding(group, "attention te", "transformer_engine is installed; this backend has not run on a GPU yet")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        problem = grouped_mm_problem(dtype)
        name = f"grouped_mm {str(dtype).removeprefix('torch.')}"
        yield Finding(group, name, problem or "forward and backward", "missing" if problem else "ok")
    found = _native_reader()
    yield Finding(group, "transformers reader", found or "no MiMoV2FlashForCausalLM", "ok" if found else "missing")


def grouped_mm_problem(dtype: torch.dtype) -> str | None:
    """Why the grouped matmul cannot train in `dtype` here (experts then run in a loop, slower), or None."""
    try:
        x = torch.ones(32, 16, dtype=dtype, requires_grad=True)
        weight = torch.ones(2, 16, 16, dtype=dtype, requires_grad=True)
        out = F.grouped_mm(x, weight, offs=torch.tensor([8, 32], dtype=torch.int32))
        out.backward(torch.ones_like(out))
    except (RuntimeError, NotImplementedError, AttributeError) as error:
        return f"not available ({str(error).splitlines()[0][:80]}); experts run in a loop"
    return None


def _native_reader() -> str | None:
    try:
        module = importlib.import_module("transformers.models.mimo_v2_flash")
    except ImportError:
        return None
    return f"{module.__name__} opens what AutoMiMo exports"


def _self_checks() -> Iterator[Finding]:
    checks: tuple[tuple[str, Callable[[], float]], ...] = (
        ("attention sdpa = eager", attention_difference),
        ("experts grouped = loop", expert_difference),
    )
    for name, difference in checks:
        try:
            value = difference()
        except Exception as error:  # noqa: BLE001 - whatever it is, this machine cannot run it: that is the finding
            yield Finding("self check", name, f"{type(error).__name__}: {error}", "failed")
            continue
        wrong = not value <= SELF_CHECK_TOLERANCE  # NaN is wrong too
        text = f"largest relative difference {value:.1e}" + (f", allowed {SELF_CHECK_TOLERANCE:.0e}" if wrong else "")
        yield Finding("self check", name, text, "failed" if wrong else "ok")


def attention_difference() -> float:
    """Largest difference, relative to the norm, of outputs and gradients between `sdpa` and `eager` on three documents.

    Full and sliding attention, 4 query heads on 2 key/value heads, with a sink, in fp32.
    """
    window = 16
    layout = build_layout([0, 70, 71, 160], window=window)
    worst = 0.0
    for layer_window in (None, window):
        results = []
        for backend in ("eager", "sdpa"):
            generator = torch.Generator().manual_seed(0)
            shapes = ((160, 4, 24), (160, 2, 24), (160, 2, 16), (4,))
            leaves = [torch.randn(*shape, generator=generator).requires_grad_() for shape in shapes]
            q, k, v, sink = leaves
            out = attend(q, k, v, layout=layout, window=layer_window, sink=sink, scale=24**-0.5, backend=backend)
            grads = torch.autograd.grad(out, leaves, torch.randn(out.shape, generator=generator))
            results.append((out.detach(), *grads))
        worst = max(worst, _worst(*results))
    return worst


def expert_difference() -> float:
    """The same between the grouped matmul and the loop over 4 experts, one of them without a token."""
    counts = torch.tensor([5, 0, 20, 39])
    results = []
    for backend in ("torch", "torch_mm"):
        generator = torch.Generator().manual_seed(0)
        shapes = ((64, 32), (4, 32, 96), (4, 48, 32))
        leaves = [torch.randn(*shape, generator=generator).requires_grad_() for shape in shapes]
        x, gate_up, down = leaves
        out = expert_mlp(x, counts, gate_up, down, backend)
        grads = torch.autograd.grad(out, leaves, torch.randn(out.shape, generator=generator))
        results.append((out.detach(), *grads))
    return _worst(*results)


def _worst(reference: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> float:
    pairs = zip(reference, other, strict=True)
    return max(float((a.double() - b.double()).norm() / a.double().norm()) for a, b in pairs)
