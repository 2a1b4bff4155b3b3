"""Recipes: what is accepted, what is refused and in which words, overrides, and the resolved copy."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from automimo.errors import ConfigError
from automimo.training.recipe import FREE_ON_RESUME, check_schedule, differences
from automimo.training.recipe_file import dotted_keys, dump_recipe, load_recipe, parse_recipe

REPOSITORY = Path(__file__).parents[2]
SMALL = """
output: runs/x
model:
  preset: tiny
data:
  train:
    - kind: python_docs
    - {kind: chat, path: a.jsonl, weight: 0.5}
train:
  steps: 10
"""


def problems(text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        parse_recipe(text, overrides, name="r.yaml")
    return str(error.value)


def test_values_and_defaults():
    recipe = parse_recipe(SMALL)
    assert recipe.model.preset == "tiny" and recipe.model.path is None
    assert [source.kind for source in recipe.data.train] == ["python_docs", "chat"]
    assert recipe.data.train[1].weight == 0.5 and recipe.data.train[0].weight == 1.0
    assert recipe.train.resume == "auto" and recipe.train.final == "bf16"
    assert recipe.folder == Path("runs/x")


def test_a_recipe_cannot_be_changed():
    recipe = parse_recipe(SMALL)
    with pytest.raises(ValidationError):
        recipe.train.steps = 3
    with pytest.raises(ValidationError):
        recipe.output = "elsewhere"


def test_overrides_are_yaml_values():
    recipe = parse_recipe(
        SMALL,
        [
            "optim.lr=1e-5",
            "data.train.1.weight=2",
            "model.train=['*.mlp.*', '*norm*']",
            "data.packing=false",
            "optim.groups=[{pattern: '*', lr: 3e-4}]",
            "optim.clip_norm=null",
            "train.steps=1_000",
            "output='123'",
        ],
    )
    assert recipe.optim.lr == 1e-5 and isinstance(recipe.optim.lr, float)
    assert recipe.data.train[1].weight == 2.0
    assert recipe.model.train == ("*.mlp.*", "*norm*")
    assert recipe.data.packing is False
    assert recipe.optim.groups[0].lr == 3e-4 and recipe.optim.clip_norm is None
    assert recipe.train.steps == 1000 and recipe.output == "123"


def test_an_override_can_switch_between_exclusive_keys():
    recipe = parse_recipe(SMALL, ["model.preset=null", "model.path=some/folder", "train.steps=null", "train.epochs=2"])
    assert recipe.model.path == "some/folder" and recipe.train.epochs == 2 and recipe.train.steps is None


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optim.lr", "write it as key=value"),
        ("=3", "write it as key=value"),
        ("optim..lr=3", "write it as key=value"),
        ("data.train.2.weight=1", "from 0 to 1"),
        ("data.train.first.weight=1", "from 0 to 1"),
        ("output.name=1", "'runs/x'"),
        ("output.name.more=1", "has no keys"),
        ("optim.betas=[0.9", "not a YAML value"),
    ],
)
def test_malformed_overrides(override: str, expected: str):
    message = problems(SMALL, override)
    assert expected in message and override.partition("=")[0] in message


def test_all_problems_at_once():
    message = problems(
        """
output: runs/x
model: {preset: tiny, path: a, atention: sdpa, attention: sdpb}
data:
  train:
    - kind: python_docs
      wheight: 2
  sequence_length: 1.5
optim: {lr: -1, betas: [0.9], warmup_steps: 10}
train:
  steps: 5
  epochs: 1
  batch: 5
  micro_batch: 2
  activation_checkpointing: 1
lr: 3
""",
        "train.keep=0",
    )
    expected = {
        "model (line 3)": "exactly one of model.path",
        "model.atention (line 3)": "did you mean model.attention?",
        "model.attention (line 3)": "did you mean 'sdpa'?",
        "data.train.0.wheight (line 7)": "did you mean data.train.0.weight?",
        "data.sequence_length (line 8)": "must be a whole number, is 1.5",
        "optim.lr (line 9)": "must be greater than 0, is -1",
        "optim.betas.1 (line 9)": "is missing",
        "optim.warmup_steps (line 9)": "10 leaves nothing of the 5 steps",
        "train (line 10)": "exactly one of train.steps and train.epochs",
        "train.batch (line 13)": "5 is not a multiple of train.micro_batch 2",
        "train.activation_checkpointing (line 15)": "1 is not one of 'none', 'full' or 'selective'",
        "lr (line 16)": "did you mean optim.lr?",
        "train.keep (command line)": "must be at least 1, is 0",
    }
    lines = dict(line[4:].split(": ", 1) for line in message.splitlines()[1:])
    assert message.startswith("r.yaml: 13 problems")
    assert lines.keys() == expected.keys()
    for key, text in expected.items():
        assert text in lines[key]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optim.name=adam", "'adam' is not one of 'adamw'; did you mean 'adamw'?"),
        ("optim.schedule=cosin", "did you mean 'cosine'?"),
        ("optim.lr=.inf", "must be a finite number"),
        ("optim.lr=.nan", "optim.lr"),
        ("optim.lr=true", "must be a number, is true"),
        ("optim.lr='1e-5'", "must be a number, is '1e-5'"),
        ("optim.betas=[0.9, 1]", "must be less than 1"),
        ("optim.betas=[0.9, 0.9, 0.9]", "optim.betas"),
        ("optim.clip_norm=0", "must be greater than 0"),
        ("train.steps=0", "must be at least 1"),
        ("train.steps=null", "exactly one of train.steps and train.epochs"),
        ("train.final=fp16", "'fp16' is not one of"),
        ("train.evaluate_every=5", "data.validation names nothing to evaluate on"),
        ("data.train=[]", "names no source to train on"),
        ("data.train=python_docs", "must be a list, is 'python_docs'"),
        ("data.train.0.path=x", "data.train.0 (line 7): path is 'x', but python_docs is built in and takes none"),
        ("data.train.1.path=null", "data.train.1 (line 8): path is missing: a source of kind chat needs one"),
        ("data.train.0.weight=0", "must be greater than 0"),
        ("data.train.1.split=test", "a chat file has no splits"),
        ("data.train.0.kind=huggingface", "'huggingface' is not one of"),
        ("data.overflow=truncate", "'truncate' is not one of"),
        ("model=tiny", "must be a mapping of keys to values, is 'tiny'"),
        ("model.window=0", "must be at least 1"),
        ("model.train='*'", "must be a list"),
        ("train.seed=9223372036854775808", "train.seed (command line): must be less than"),
        ("data.seed=9223372036854775808", "data.seed (command line): must be less than"),
        ("output=''", "must not be empty"),
        ("output=null", "must be text, is null"),
        ("lora.rank=8", "lora"),
        ("train.compiled=true", "train.compiled"),
        ("training.steps=3", "did you mean train?"),
        ("moe.bias_update_sped=0.1", "did you mean moe.bias_update_speed?"),
        ("moe={router: freeze, aux_loss: 0.1}", "must be 0 when moe.router is freeze"),
        ("moe={router: freeze, bias_update_speed: 0.1}", "must be 0 when moe.router is freeze"),
    ],
)
def test_single_problems(override: str, expected: str):
    message = problems(SMALL, override)
    assert expected in message
    assert message.startswith("r.yaml: ") and "\n" not in message


def test_missing_keys_are_all_named():
    message = problems("model: {}\n")
    assert "output: is missing" in message
    assert "data: is missing" in message and "train: is missing" in message
    assert "exactly one of model.path" in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: 1\na: 2\n", 'line 2: found duplicate key "a"'),
        ("output: [1\n", "line 2: not valid YAML"),
        ("a: 1\n---\nb: 2\n", "not valid YAML"),
        ("- 1\n", "a mapping of keys to values, not [1]"),
        ("", "a mapping of keys to values, not null"),
        ("output: !!python/object/apply:os.system [x]\n", "line 1: not valid YAML"),
        ("a: " + "[" * 5000, "nested too deeply"),
        ("output: &a [*a]\nmodel: {preset: tiny}\n", "must be text"),
    ],
)
def test_files_that_are_no_recipe(text: str, expected: str):
    assert expected in problems(text)


def test_files_that_cannot_be_read(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"none\.yaml: no such recipe file"):
        load_recipe(tmp_path / "none.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"output: caf\xe9\n")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_recipe(tmp_path / "latin.yaml")


@settings(max_examples=60, deadline=None)
@given(
    lr=st.floats(min_value=1e-30, max_value=1e10),
    output=st.text(min_size=1, max_size=30).filter(lambda text: text.isprintable()),
    patterns=st.lists(st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), min_size=1), max_size=3),
    steps=st.integers(1, 10**12),
)
def test_the_resolved_copy_reads_back_equal(lr: float, output: str, patterns: list[str], steps: int):
    recipe = parse_recipe(SMALL)
    optim = recipe.optim.model_copy(update={"lr": lr})
    model = recipe.model.model_copy(update={"train": tuple(patterns)})
    train = recipe.train.model_copy(update={"steps": steps})
    recipe = recipe.model_copy(update={"output": output, "optim": optim, "model": model, "train": train})
    assert parse_recipe(dump_recipe(recipe)) == recipe


def test_the_resolved_copy_names_every_key():
    text = dump_recipe(parse_recipe(SMALL, ["optim.groups=[{pattern: '*'}]", "data.validation=[{kind: python_docs}]"]))
    for key in dotted_keys():
        assert re.search(rf"^[\s-]*{re.escape(key.rpartition('.')[2])}:", text, re.M), key


def test_what_a_resumed_run_may_change():
    old = parse_recipe(SMALL).model_dump(mode="json")
    assert dotted_keys().keys() >= FREE_ON_RESUME
    free = parse_recipe(SMALL, ["train.steps=20", "output=runs/y", "train.save_every=7", "train.keep=1"])
    assert differences(old, free.model_dump(mode="json")) == []
    changed = parse_recipe(SMALL, ["optim.lr=0.5", "train.seed=3", "data.train=[{kind: python_docs}]"])
    assert differences(old, changed.model_dump(mode="json")) == [
        "data.train.1.kind: chat -> null",
        "data.train.1.path: a.jsonl -> null",
        "data.train.1.weight: 0.5 -> null",
        "optim.lr: 1e-05 -> 0.5",
        "train.seed: 0 -> 3",
    ]


def test_warmup_is_checked_again_when_epochs_have_become_steps():
    recipe = parse_recipe(SMALL, ["train.steps=null", "train.epochs=1", "optim.warmup_steps=50"])
    check_schedule(recipe.optim, 51)
    with pytest.raises(ConfigError, match="50 leaves nothing of the 50 steps"):
        check_schedule(recipe.optim, 50)


@pytest.mark.parametrize("path", sorted((REPOSITORY / "recipes").glob("*.yaml")), ids=lambda path: path.name)
def test_every_recipe_we_ship_is_valid(path: Path):
    recipe = load_recipe(path)
    assert parse_recipe(dump_recipe(recipe)) == recipe


def test_reading_a_recipe_imports_no_torch():
    code = (
        "import sys, automimo.training.recipe_file; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_the_docs_list_every_key_and_no_other():
    text = (REPOSITORY / "docs" / "recipes.md").read_text()
    documented = re.findall(r"^\| `([^`]+)` \| ([^|]*) \| ", text, re.M)
    keys = dotted_keys()
    assert [key for key, _ in documented] == list(keys)
    for key, default in documented:
        field = keys[key]
        shown = "required" if field.is_required() else _yaml(field.get_default())
        assert default.strip() == shown, key
        assert field.description in text, key


def _yaml(value: object) -> str:
    if value is None or isinstance(value, bool):
        return f"`{'null' if value is None else str(value).lower()}`"
    if isinstance(value, tuple):
        return "`[" + ", ".join(f'"{v}"' if isinstance(v, str) else str(v) for v in value) + "]`"
    return f"`{value}`"


def test_the_example_of_the_docs_is_a_recipe():
    example = re.search(r"```yaml\n(.*?)```", (REPOSITORY / "docs" / "recipes.md").read_text(), re.S)
    assert example and parse_recipe(example[1]).train.epochs == 2
