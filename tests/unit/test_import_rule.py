"""Who may import whom, and what may be imported without torch.

The rule is read from the source with `ast`. A part is a package or a module directly below `automimo`; it imports
itself, the parts that `ALLOWED` lists for it, and `automimo` (the version), `automimo.errors` and `automimo.lazy`
besides. Imports in functions and for type checkers count as well. A new part needs a line in `ALLOWED`.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import automimo

SOURCE = Path(automimo.__file__).parent

ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "lazy": set(),
    # Ground floor: nothing of the model, nothing of each other but what stays in fp32.
    "attention": {"distributed", "fp32"},
    "distributed": set(),
    "checkpoint": {"distributed"},
    "fp32": set(),
    "machine": set(),
    "moe": {"backend", "distributed", "fp32"},
    "quantization": set(),
    "backend": set(),
    # Data knows no model and no training.
    "data": set(),
    # The model stands on the ground floor, what uses it stands on the model.
    "mimo_v2_flash": {"attention", "backend", "checkpoint", "distributed", "fp32", "moe", "quantization"},
    "parallelize": {"distributed", "mimo_v2_flash", "moe"},
    "convert": {"checkpoint", "mimo_v2_flash", "quantization"},
    "inspect_checkpoint": {"checkpoint", "mimo_v2_flash"},
    "generate": {"attention", "backend", "mimo_v2_flash"},
    "init_model": {"checkpoint", "data", "machine", "mimo_v2_flash"},
    "report": set(),
    "training": {
        *("attention", "backend", "checkpoint", "distributed", "fp32", "machine", "moe"),
        *("mimo_v2_flash", "data", "generate", "init_model", "parallelize", "report"),
    },
    # What the verbs do, and the command line on top of all.
    "answer": {"generate"},
    "compare": {"cli_errors", "generate"},
    "compare_runs": {"checkpoint", "cli_errors", "training"},
    "doctor": {"attention", "machine", "moe"},
    "evaluate": {"data", "generate", "mimo_v2_flash", "training"},
    "inspect_recipe": {"data", "training"},
    "cli_errors": set(),
    "launch": set(),
    "cli": {
        *("answer", "cli_errors", "convert", "doctor", "evaluate", "generate", "init_model", "inspect_checkpoint"),
        *("inspect_recipe", "launch", "mimo_v2_flash", "report", "training"),
    },
    "__main__": {"cli"},
}
FOR_ALL = {"", "errors", "lazy"}

# Importable where torch and transformers are not: the command line before a verb runs, and everything config-like.
LIGHT = [
    "automimo",
    "automimo.__main__",
    "automimo.backend",
    "automimo.cli",
    "automimo.cli_errors",
    "automimo.data",
    "automimo.data.packing",
    "automimo.data.records",
    "automimo.data.sources",
    "automimo.errors",
    "automimo.launch",
    "automimo.machine",
    "automimo.mimo_v2_flash",
    "automimo.moe",
    "automimo.moe.config",
    "automimo.report",
    "automimo.training",
    "automimo.training.recipe",
    "automimo.training.recipe_file",
]


def source_files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def part_of(module: str) -> str:
    return module.split(".", maxsplit=1)[0]


def imported(tree: ast.AST) -> Iterator[str]:
    """Modules below automimo that are imported anywhere in the tree, '' for automimo itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative imports hide who imports whom"
            names = [node.module or ""]
            if node.module == "automimo":
                # `from automimo import x` imports the part x when there is one.
                parts = [alias.name for alias in node.names if alias.name in ALLOWED]
                names = [f"automimo.{part}" for part in parts] or names
        else:
            continue
        for name in names:
            if name == "automimo" or name.startswith("automimo."):
                yield name.removeprefix("automimo").removeprefix(".")


def at_import_time(tree: ast.Module) -> ast.Module:
    """The statements that run when the module is imported: no function bodies, nothing for type checkers."""

    class Strip(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> None: ...

        def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None: ...

        def visit_If(self, node: ast.If) -> ast.AST | None:
            return None if "TYPE_CHECKING" in ast.dump(node.test) else self.generic_visit(node)

    stripped = Strip().visit(tree)
    assert isinstance(stripped, ast.Module)
    return stripped


def test_every_part_has_a_line_in_the_rule() -> None:
    parts = {part_of(module_name(path)) for path in source_files()} - {"__init__"}
    assert parts == set(ALLOWED)


@pytest.mark.parametrize("part", sorted(ALLOWED))
def test_a_part_imports_only_what_it_may(part: str) -> None:
    wrong = []
    for path in source_files():
        if part_of(module_name(path)) != part:
            continue
        for name in imported(ast.parse(path.read_text(encoding="utf-8"))):
            other = part_of(name)
            if other not in FOR_ALL | {part} | ALLOWED[part]:
                wrong.append(f"{path.relative_to(SOURCE)} imports automimo.{name}")
    assert wrong == []


def test_the_package_itself_imports_nothing_but_the_lazy_names_when_it_is_imported() -> None:
    tree = ast.parse((SOURCE / "__init__.py").read_text(encoding="utf-8"))
    assert {part_of(name) for name in imported(at_import_time(tree))} == {"lazy"}


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """The nodes of a cycle of the graph, [] when there is none: take away what imports nothing that is left."""
    left = {node: {n for n in targets if n != node} for node, targets in graph.items()}
    while leaves := [node for node, targets in left.items() if not targets & set(left)]:
        for node in leaves:
            del left[node]
    return sorted(left)


def test_the_rule_has_no_cycles() -> None:
    assert cycle(ALLOWED) == []
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == ["a", "b", "c", "d"]


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    names = {module_name(path) for path in source_files()}
    graph = {}
    for path in source_files():
        tree = at_import_time(ast.parse(path.read_text(encoding="utf-8")))
        targets = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("automimo."):
                module = (node.module or "").removeprefix("automimo.")
                # `from automimo.checkpoint import resume` imports the module automimo.checkpoint.resume.
                submodules = {f"{module}.{alias.name}" for alias in node.names} & names
                targets |= submodules or {module}
        graph[module_name(path)] = targets
    assert cycle(graph) == []


BLOCK_TORCH = """
import importlib, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "transformers", "datasets", "tokenizers", "safetensors", "matplotlib"}:
            raise ImportError(f"{name} must not be imported here")

sys.meta_path.insert(0, Blocked())
for name in sys.argv[1:]:
    importlib.import_module(name)
print("imported", len(sys.argv) - 1)
"""


def import_without_torch(*names: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BLOCK_TORCH, *names]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_light_modules_import_without_torch() -> None:
    done = import_without_torch(*LIGHT)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == f"imported {len(LIGHT)}"


def test_the_block_on_torch_works() -> None:
    done = import_without_torch("automimo.attention")
    assert done.returncode == 1
    assert "torch must not be imported here" in done.stderr


@pytest.mark.parametrize("path", source_files(), ids=module_name)
def test_nothing_unpickles_or_runs_remote_code(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            assert not {"pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"} & {
                n.split(".")[0] for n in names
            }
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
            assert node.attr not in ("load", "save"), f"line {node.lineno}: torch.{node.attr}"
        if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
            assert isinstance(node.value, ast.Constant), f"line {node.value.lineno}: trust_remote_code"
            assert node.value.value is False, f"line {node.value.lineno}: trust_remote_code"
