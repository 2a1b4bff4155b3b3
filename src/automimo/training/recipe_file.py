"""Reading and writing recipes: YAML, dotted overrides, and all problems in one message. Imports no torch."""

import difflib
import io
import types
import typing
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from automimo.errors import ConfigError
from automimo.training.recipe import Recipe, Section, cross_check


def load_recipe(path: Path | str, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe file, apply `key=value` overrides, and validate it.

    Raises ConfigError: the file is missing or is not YAML, an override is malformed, or keys are wrong; all wrong keys
    are named in one message, with the line of the file and a suggestion for names nobody knows.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"{path}: no such recipe file")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text ({error})") from error
    return parse_recipe(text, overrides, name=str(path))


def parse_recipe(text: str, overrides: Sequence[str] = (), *, name: str = "recipe") -> Recipe:
    """`load_recipe` for text that is already in memory; `name` stands for the file in messages."""
    values, lines = _read_yaml(text, name)
    changed: set[str] = set()
    for override in overrides:
        changed.add(_apply_override(values, override))
    return validate(values, name=name, lines=lines, overridden=changed)


def dump_recipe(recipe: Recipe) -> str:
    """YAML with every key, defaults included; `parse_recipe` reads it back to an equal recipe."""
    yaml = YAML(typ="rt")
    yaml.default_flow_style = False
    yaml.width = 1000  # long paths stay on one line
    buffer = io.StringIO()
    yaml.dump(recipe.model_dump(mode="json"), buffer)
    return buffer.getvalue()


def validate(
    values: dict[str, Any],
    *,
    name: str = "recipe",
    lines: dict[str, int] | None = None,
    overridden: Collection[str] = (),
) -> Recipe:
    """Nested plain values -> Recipe. Sections are validated one by one, so that rules between keys are checked even
    when some other section is broken, and everything wrong is reported at once (ConfigError)."""
    problems = [(str(key), _unknown(str(key))) for key in values if key not in Recipe.model_fields]
    sections: dict[str, Any] = {}
    for key, field in Recipe.model_fields.items():
        given = values.get(key)
        if given is None and not field.is_required():
            sections[key] = field.get_default()
        elif key not in values:
            problems.append((key, "is missing"))
        else:
            sections[key], errors = _validate_field(key, field, given)
            problems += errors
    broken = [key for key, _ in problems]
    for problem in cross_check(sections):
        hidden = any(wrong == key or wrong.startswith(key + ".") for key in problem.involves for wrong in broken)
        if problem.key not in broken and not hidden:
            problems.append((problem.key, problem.text))
    if problems:
        raise ConfigError(_message(problems, name, lines or {}, overridden))
    return Recipe(**sections)


def _validate_field(key: str, field: FieldInfo, given: Any) -> tuple[Any, list[tuple[str, str]]]:
    """(value, problems). A broken section comes back without its wrong keys, so that the others can still be checked
    against each other; it is None where that leaves too little."""
    adapter: TypeAdapter[Any] = TypeAdapter(Annotated[field.annotation, field])  # type: ignore[arg-type]
    try:
        return adapter.validate_python(given), []
    except ValidationError as error:
        details = error.errors(include_url=False)
    problems = [_explain(key, item) for item in details]
    if not isinstance(given, dict):
        return None, problems
    wrong = {item["loc"][0] for item in details if item["loc"]}
    try:
        return adapter.validate_python({k: v for k, v in given.items() if k not in wrong}), problems
    except ValidationError:
        return None, problems


def dotted_keys(section: type[BaseModel] = Recipe, prefix: str = "") -> dict[str, Any]:
    """{dotted key: pydantic field} of every leaf of the schema; list items appear as `data.train.N.kind`."""
    keys: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        inner = _inner_section(field.annotation)
        if inner is None:
            keys[prefix + name] = field
        elif _is_section(field.annotation):
            keys |= dotted_keys(inner, f"{prefix}{name}.")
        else:
            keys |= dotted_keys(inner, f"{prefix}{name}.N.")
    return keys


# --- reading -------------------------------------------------------------------------------------------------------


def _read_yaml(text: str, name: str) -> tuple[dict[str, Any], dict[str, int]]:
    yaml = YAML(typ="safe", pure=True)  # YAML 1.2: 1e-5 is a number, `no` is text; duplicate keys are errors
    try:
        values = yaml.load(text)
        root = YAML(typ="safe", pure=True).compose(text)
    except DuplicateKeyError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{name}{line}: {str(error.problem).splitlines()[0]}") from error
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{name}{line}: not valid YAML: {error.problem or error.context}") from error
    except (YAMLError, ValueError) as error:
        raise ConfigError(f"{name}: not valid YAML: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{name}: nested too deeply for a recipe") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{name}: a recipe is a mapping of keys to values, not {_show(values)}")
    lines: dict[str, int] = {}
    _collect_lines(root, "", lines, depth=0)
    return values, lines


def _collect_lines(node: Node, prefix: str, lines: dict[str, int], depth: int) -> None:
    """Dotted key -> 1-based line. The depth limit ends aliases that contain themselves."""
    if depth > 8:
        return
    if isinstance(node, MappingNode):
        for key, value in node.value:
            if isinstance(key, ScalarNode):
                dotted = f"{prefix}{key.value}"
                lines[dotted] = key.start_mark.line + 1
                _collect_lines(value, dotted + ".", lines, depth + 1)
    elif isinstance(node, SequenceNode):
        for i, value in enumerate(node.value):
            lines[f"{prefix}{i}"] = value.start_mark.line + 1
            _collect_lines(value, f"{prefix}{i}.", lines, depth + 1)


def _apply_override(values: dict[str, Any], override: str) -> str:
    """Set one `a.b.0.c=value` in place; returns the dotted key. Missing mappings on the way are made."""
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not key or not all(key.split(".")):
        raise ConfigError(f"override {override!r}: write it as key=value, for example optim.lr=1e-5")
    try:
        value = YAML(typ="safe", pure=True).load(text)
    except (YAMLError, ValueError) as error:
        raise ConfigError(f"override {key}: {text!r} is not a YAML value; quote it") from error
    *parents, last = key.split(".")
    place: Any = values
    for i, part in enumerate(parents):
        place = _step_into(place, part, ".".join(parents[: i + 1]), override)
    if isinstance(place, list):
        place[_index(place, last, key, override)] = value
    elif isinstance(place, dict):
        place[last] = value
    else:
        raise ConfigError(f"override {override!r}: {'.'.join(parents)} is {_show(place)} and has no keys")
    return key


def _step_into(place: Any, part: str, dotted: str, override: str) -> Any:
    if isinstance(place, list):
        return place[_index(place, part, dotted, override)]
    if not isinstance(place, dict):
        raise ConfigError(f"override {override!r}: {dotted} lies inside {_show(place)}, which has no keys")
    if place.get(part) is None:
        place[part] = {}
    return place[part]


def _index(place: list[Any], part: str, dotted: str, override: str) -> int:
    if not part.isdecimal() or int(part) >= len(place):
        raise ConfigError(
            f"override {override!r}: {dotted} must be a number from 0 to {len(place) - 1} (the list has {len(place)})"
        )
    return int(part)


# --- messages ------------------------------------------------------------------------------------------------------


def _message(problems: list[tuple[str, str]], name: str, lines: dict[str, int], overridden: Collection[str]) -> str:
    out = []
    for key, text in problems:
        where = ""
        if key in overridden:
            where = " (command line)"
        else:
            known = key
            while known and known not in lines:
                known = known.rpartition(".")[0]
            if known:
                where = f" (line {lines[known]})"
        out.append(f"{key}{where}: {text}")
    if len(out) == 1:
        return f"{name}: {out[0]}"
    return f"{name}: {len(out)} problems\n" + "\n".join(f"  - {line}" for line in out)


def _explain(section: str, error: Any) -> tuple[str, str]:
    """One pydantic error in our words."""
    key = ".".join([section, *(str(part) for part in error["loc"])])
    kind, context, value = error["type"], error.get("ctx", {}), error.get("input")
    shown = _show(value)
    if kind == "extra_forbidden":
        return key, _unknown(key)
    if kind == "missing":
        return key, "is missing"
    if kind == "literal_error":
        choices = str(context["expected"])
        names = [c.strip("' ") for c in choices.replace(" or ", ",").split(",")]
        text = f"{shown} is not one of {choices}"
        near = difflib.get_close_matches(str(value), names, 1)
        return key, text + (f"; did you mean {near[0]!r}?" if near else "")
    words = {
        "greater_than": lambda: f"must be greater than {context['gt']:g}, is {shown}",
        "greater_than_equal": lambda: f"must be at least {context['ge']:g}, is {shown}",
        "less_than": lambda: f"must be less than {context['lt']:g}, is {shown}",
        "less_than_equal": lambda: f"must be at most {context['le']:g}, is {shown}",
        "finite_number": lambda: f"must be a finite number, is {shown}",
        "int_type": lambda: f"must be a whole number, is {shown}",
        "int_from_float": lambda: f"must be a whole number, is {shown}",
        "float_type": lambda: f"must be a number, is {shown}",
        "bool_type": lambda: f"must be true or false, is {shown}",
        "string_type": lambda: f"must be text, is {shown}; quote it if it is meant as text",
        "string_too_short": lambda: "must not be empty",
        "tuple_type": lambda: f"must be a list, is {shown}",
        "model_type": lambda: f"must be a mapping of keys to values, is {shown}",
    }
    if kind == "too_short":
        return key, f"needs at least {context['min_length']} entries, has {context['actual_length']}"
    if kind == "too_long":
        return key, f"takes at most {context['max_length']} entries, has {context['actual_length']}"
    return key, words[kind]() if kind in words else f"{error['msg']}, is {shown}"


def _unknown(key: str) -> str:
    """An unknown key, with the key that was probably meant: a near name at this place, else the same name elsewhere."""
    pattern = ".".join("N" if part.isdecimal() else part for part in key.split("."))
    parent, _, leaf = pattern.rpartition(".")
    sections = {known.rpartition(".")[0] for known in dotted_keys()}
    everything = sorted({*dotted_keys(), *(s for s in sections if s)}, key=lambda k: (k.count("."), k))
    siblings = [k for k in everything if k.rpartition(".")[0] == parent]
    near = difflib.get_close_matches(leaf, [k.rpartition(".")[2] for k in siblings], 1)
    if near:
        guess = f"{key.rpartition('.')[0]}.{near[0]}" if parent else near[0]
    else:
        elsewhere = difflib.get_close_matches(leaf, [k.rpartition(".")[2] for k in everything], 1, cutoff=0.75)
        guess = next((k for k in everything if elsewhere and k.rpartition(".")[2] == elsewhere[0]), "")
    if guess:
        return f"unknown key; did you mean {guess}?"
    names = ", ".join(k.rpartition(".")[2] for k in siblings) or "none"
    return f"unknown key; known here: {names}"


def _show(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def _inner_section(annotation: Any) -> type[Section] | None:
    """The Section a field is, or is a list of; None for plain values."""
    if _is_section(annotation):
        found: type[Section] = annotation
        return found
    if isinstance(annotation, types.GenericAlias | typing._GenericAlias):  # type: ignore[attr-defined]
        for argument in typing.get_args(annotation):
            inner = _inner_section(argument)
            if inner is not None:
                return inner
    return None
