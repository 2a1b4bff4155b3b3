"""Python's own documentation as conversations: real text that every Python carries.

Two parts: the language reference that `help()` prints (`pydoc_data.topics`) and the docstrings of the standard library.
Both are read from source files with `ast`; no module is imported, so nothing of it runs.
"""

import ast
import hashlib
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Literal

from automimo.data.records import ChatRecord
from automimo.errors import DataError

# Tests, installed packages, and tools whose docstrings are notes to their own authors.
_SKIPPED_FOLDERS = frozenset(
    ["test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip", "encodings", "pydoc_data", "__pycache__"]
    + ["site-packages", "dist-packages"]
)
_SHORTEST_TEXT = 60  # characters; below that a docstring mostly repeats the name
_HELD_OUT = 20  # one name in so many is validation
_PHRASES = ("Explain `{}`.", "What does `{}` do?", "Describe `{}`.", "Tell me about `{}` in Python.")


def python_docs_records(split: Literal["train", "validation"]) -> Iterator[ChatRecord]:
    """Conversations "Explain `X`." -> text, in the order of the names X.

    Which names are held out (about 5 %), and how a question is put, follows from a hash of the name; a text that occurs
    under several names is used once, so no validation text is in train. The text is that of the running Python.
    Raises DataError when this Python has no library sources.
    """
    for name, text in sorted(_documentation().items()):
        digest = hashlib.sha256(name.encode()).digest()
        held_out = int.from_bytes(digest[:4], "big") % _HELD_OUT == 0
        if held_out == (split == "validation"):
            question = _PHRASES[digest[4] % len(_PHRASES)].format(name)
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": text}]
            yield ChatRecord(messages, None, f"python_docs:{name}")


@cache  # reading takes seconds; a run asks for train and validation
def _documentation() -> dict[str, str]:
    """Name -> text: topics of the language reference, then docstrings; of equal texts the first name stays."""
    root = Path(sysconfig.get_path("stdlib"))
    texts = _topics(root / "pydoc_data" / "topics.py")
    for name, text in sorted(_docstrings(root)):
        texts.setdefault(name, text)
    owner: dict[str, str] = {}
    for name, text in texts.items():
        owner.setdefault(text, name)
    return {name: text for text, name in owner.items() if len(text) >= _SHORTEST_TEXT}


def _topics(path: Path) -> dict[str, str]:
    if not path.is_file():
        raise DataError(f"python_docs: this Python has no {path}; install its full standard library")
    for node in _parse(path).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            return {name: text.strip() for name, text in sorted(ast.literal_eval(node.value).items())}
    raise DataError(f"python_docs: {path} holds no table of topics")


def _docstrings(root: Path) -> Iterator[tuple[str, str]]:
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        if _SKIPPED_FOLDERS.isdisjoint(parts) and not any(part.startswith("_") for part in _module_parts(parts)):
            yield from _docstrings_of(_parse(path), ".".join(_module_parts(parts)))


def _module_parts(parts: tuple[str, ...]) -> tuple[str, ...]:
    return parts[:-1] if parts[-1] == "__init__" else parts


def _docstrings_of(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, name: str
) -> Iterator[tuple[str, str]]:
    text = ast.get_docstring(node)
    if text:
        yield name, text.strip()
    if isinstance(node, ast.Module | ast.ClassDef):
        for child in node.body:
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and child.name[0] != "_":
                yield from _docstrings_of(child, f"{name}.{child.name}")


def _parse(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        raise DataError(f"python_docs: cannot read {path}: {error}") from error
