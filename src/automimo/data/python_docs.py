"""Python's own documentation as conversations: real text that every Python carries.

Two parts: the language reference that `help()` prints (`pydoc_data.topics`) and the docstrings of the standard library.
Both are read from source files with `ast`; no module is imported, so nothing of it runs.
"""

import ast
import hashlib
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Literal

from automimo.data.records import ChatRecord
from automimo.errors import DataError

# Tests, and tools whose docstrings are notes to their own authors. Installed packages lie in folders with a hyphen.
_SKIPPED_FOLDERS = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip", "encodings", "pydoc_data"}
_SHORTEST_TEXT = 60  # characters; below that a docstring mostly repeats the name
_HELD_OUT = 20  # one name in so many is validation
_PHRASES = ("Explain `{}`.", "What does `{}` do?", "Describe `{}`.", "Tell me about `{}` in Python.")


def python_docs_records(split: Literal["train", "validation"]) -> Iterator[ChatRecord]:
    """Conversations "Explain `X`." -> text, in the order of the names X.

    Which names are held out (about 5 %), and how a question is put, follows from a hash of the name; a text that occurs
    under several names is used once, so no validation text is in train. The text is that of the running Python.
    Raises DataError when this Python has no library sources.
    """
    for name, text in sorted(_documentation(Path(ast.__file__).parent).items()):
        digest = hashlib.sha256(name.encode()).digest()
        held_out = int.from_bytes(digest[:4], "big") % _HELD_OUT == 0
        if held_out == (split == "validation"):
            question = _PHRASES[digest[4] % len(_PHRASES)].format(name)
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": text}]
            yield ChatRecord(messages, None, f"python_docs:{name}")


@cache  # reading takes seconds; a run asks for train and validation
def _documentation(root: Path) -> dict[str, str]:
    """Name -> text: topics of the language reference, then docstrings; of equal texts the first name stays."""
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
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if _is_public(name) and name not in _SKIPPED_FOLDERS]
        package = Path(folder).relative_to(root).parts
        for file in files:
            module = file.removesuffix(".py")
            if module != file and (module == "__init__" or _is_public(module)):
                name = ".".join(package if module == "__init__" else (*package, module))
                yield from _docstrings_of(_parse(Path(folder, file)), name)


def _is_public(name: str) -> bool:
    return name.isidentifier() and not name.startswith("_")


def _docstrings_of(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, name: str
) -> Iterator[tuple[str, str]]:
    text = ast.get_docstring(node)
    if text:
        yield name, text.strip()
    if isinstance(node, ast.Module | ast.ClassDef):
        for child in node.body:
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and _is_public(child.name):
                yield from _docstrings_of(child, f"{name}.{child.name}")


def _parse(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        raise DataError(f"python_docs: cannot read {path}: {error}") from error
