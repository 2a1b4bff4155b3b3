"""New model folders: the weights are those of `initialize_weights`, whatever way they are cut and written."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, GenerationConfig

from automimo import init_model as module
from automimo.checkpoint import CheckpointReader, TensorEntry, tensor_entry, write_checkpoint
from automimo.errors import CheckpointError, ConfigError, DataError
from automimo.init_model import PartwiseWeights, generation_config, init_model, model_parts
from automimo.machine import Memory
from automimo.mimo_v2_flash.config import MiMoV2Config, MiMoV2FlashConfig
from automimo.mimo_v2_flash.model import MiMoV2FlashForCausalLM
from automimo.mimo_v2_flash.presets import preset_config
from automimo.mimo_v2_flash.tokenizer import build_tokenizer, save_tokenizer


def words() -> Iterator[str]:
    """Enough different words to fill 4,096 tokens, the same in every process."""
    draw = random.Random(0)
    for _ in range(1500):
        yield " ".join("".join(draw.choices("abcdefghijklmnop", k=draw.randint(2, 9))) for _ in range(40))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("init") / "tiny"
    init_model(target, "tiny", seed=7, tokenizer_texts=words())
    return target


def reference(seed: int) -> dict[str, torch.Tensor]:
    """The plain way: the whole model in memory, one seed, one call."""
    model = MiMoV2FlashForCausalLM.from_config(preset_config("tiny"))
    torch.manual_seed(seed)
    model.initialize_weights(dtype=torch.float32)
    return model.state_dict()


def test_weights_equal_one_seeded_call_in_memory(folder: Path) -> None:
    loaded = MiMoV2FlashForCausalLM.from_pretrained(str(folder)).state_dict()
    expected = reference(7)
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
    other = reference(8)
    assert not torch.equal(loaded["lm_head.weight"], other["lm_head.weight"])


def test_the_callers_random_numbers_go_on_undisturbed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    first = torch.rand(3)
    torch.manual_seed(0)
    init_model(tmp_path / "m", "tiny", seed=7, tokenizer_texts=words())
    assert torch.equal(torch.rand(3), first)


def test_the_same_arguments_give_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    init_model(again, "tiny", seed=7, tokenizer_texts=words())
    names = sorted(path.name for path in folder.iterdir())
    assert sorted(path.name for path in again.iterdir()) == names
    for name in names:
        assert (again / name).read_bytes() == (folder / name).read_bytes(), name


def meta_model() -> MiMoV2FlashForCausalLM:
    with torch.device("meta"):
        return MiMoV2FlashForCausalLM.from_config(preset_config("tiny"))


@pytest.mark.parametrize("order", ["forward", "backward", "shuffled"])
def test_parts_may_be_asked_for_in_any_order(order: str) -> None:
    """Shards are not written strictly in the order of the model; a part that comes again is the same again."""
    entries = PartwiseWeights(meta_model(), 7, torch.float32).entries()
    if order == "backward":
        entries.reverse()
    elif order == "shuffled":
        random.Random(0).shuffle(entries)
        # Every expert by itself would change the part hundreds of times; one of each kind shows the same.
        entries = [e for e in entries if ".experts." not in e.key or ".experts.3.up" in e.key]
    model = MiMoV2FlashForCausalLM.from_config(preset_config("tiny"))
    model.load_state_dict(reference(7))
    expected = {entry.key: entry for entry in model.checkpoint_entries(torch.float32)}
    assert len(entries) > 60
    for entry in entries:
        produced, wanted = entry.produce(), expected[entry.key].produce()
        assert isinstance(produced, torch.Tensor)
        assert isinstance(wanted, torch.Tensor)
        assert torch.equal(produced, wanted), entry.key


def test_only_one_part_is_in_memory() -> None:
    model = meta_model()
    weights = PartwiseWeights(model, 0, torch.float32)
    for entry in weights.entries():
        entry.produce()
        real = {name for name, part in model_parts(model).items() if any(not p.is_meta for p in part.parameters())}
        assert len(real) == 1
        assert entry.key.startswith(f"{next(iter(real))}.")


def test_the_parts_are_the_whole_model() -> None:
    model = meta_model()
    named = {f"{name}.{inner}" for name, part in model_parts(model).items() for inner, _ in part.named_parameters()}
    assert named == {name for name, _ in model.named_parameters()}


def test_small_shards_in_bf16_keep_the_router_in_fp32(tmp_path: Path) -> None:
    """A shard holds its fp32 tensors first, so parts are asked for out of order."""
    write_checkpoint(tmp_path, PartwiseWeights(meta_model(), 7, torch.bfloat16).entries(), max_shard_bytes=700_000)
    expected = reference(7)
    assert len(list(tmp_path.glob("*.safetensors"))) > 5
    with CheckpointReader(tmp_path) as reader:
        gate = "model.layers.4.mlp.gate.weight"
        assert torch.equal(reader.read(gate), expected[gate])
        up = reader.read("model.layers.4.mlp.experts.5.up_proj.weight")
        half = expected["model.layers.4.mlp.experts.gate_and_up_projs"][5].chunk(2, dim=-1)[1]
        assert up.dtype == torch.bfloat16
        assert torch.equal(up, half.t().to(torch.bfloat16))
        head = reader.read("lm_head.weight")
        assert torch.equal(head, expected["lm_head.weight"].to(torch.bfloat16))


def test_transformers_opens_the_small_files(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    generation = GenerationConfig.from_pretrained(folder)
    config = MiMoV2FlashConfig.from_pretrained(folder)
    assert config.eos_token_id == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert config.pad_token_id == tokenizer.pad_token_id == generation.pad_token_id
    stops = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>", "<|mimo_audio_eod|>"])
    assert generation.eos_token_id == stops
    assert (generation.do_sample, generation.temperature, generation.top_p) == (True, 0.8, 0.95)


def test_the_released_stop_ids_stand_in_for_a_tokenizer() -> None:
    values = generation_config(preset_config("v2.5"), None)
    assert values["eos_token_id"] == [151645, 151643, 151672]
    assert values["temperature"] == 1.0


def test_tiny_omni_is_its_text_part(tmp_path: Path) -> None:
    target = tmp_path / "omni"
    init_model(target, "tiny-omni", tokenizer_texts=words())
    values = json.loads((target / "config.json").read_text())
    assert values["model_type"] == "mimo_v2"
    assert "vision_config" not in values
    with CheckpointReader(target) as reader:
        assert not any(key.startswith("visual") for key in reader.tensors)
    assert MiMoV2Config.from_pretrained(target).vocab_size == 4096


def test_dtype_is_that_of_the_weights(tmp_path: Path) -> None:
    target = tmp_path / "half"
    init_model(target, "tiny", dtype=torch.bfloat16, tokenizer_texts=words())
    assert json.loads((target / "config.json").read_text())["dtype"] == "bfloat16"
    with CheckpointReader(target) as reader:
        kinds = {key: info.torch_dtype for key, info in reader.tensors.items()}
    assert kinds["model.layers.1.mlp.gate.weight"] == torch.float32
    assert kinds["model.embed_tokens.weight"] == torch.bfloat16


def test_a_given_tokenizer_is_copied_byte_for_byte(tmp_path: Path) -> None:
    source = tmp_path / "tokenizer"
    source.mkdir()
    save_tokenizer(build_tokenizer(words(), 1000), source)
    (source / "notes.txt").write_text("not a file of a tokenizer")
    target = tmp_path / "model"
    init_model(target, "tiny", tokenizer_folder=source)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (target / name).read_bytes() == (source / name).read_bytes()
    assert not (target / "notes.txt").exists()
    assert json.loads((target / "config.json").read_text())["eos_token_id"] == 970  # 968 + its place in the list


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "tokenizer"
    source.mkdir()
    save_tokenizer(build_tokenizer(words(), 4200), source)
    with pytest.raises(ConfigError, match=r"4,200 tokens, the preset's vocab_size is 4,096"):
        init_model(tmp_path / "model", "tiny", tokenizer_folder=source)
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer"]


def test_refusals_leave_nothing(tmp_path: Path) -> None:
    used = tmp_path / "used"
    used.mkdir()
    (used / "mine.txt").write_text("keep")
    with pytest.raises(CheckpointError, match="not an empty folder"):
        init_model(used, "tiny", tokenizer_texts=words())
    with pytest.raises(ConfigError, match="'giant' is unknown"):
        init_model(tmp_path / "new", "giant")
    with pytest.raises(DataError, match="vocab_size is 4096"):
        init_model(tmp_path / "new", "tiny", tokenizer_texts=["too little text"])
    assert [path.name for path in tmp_path.iterdir()] == ["used"]
    assert (used / "mine.txt").read_text() == "keep"


def test_too_little_disk_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "free_disk_bytes", lambda path: 100 * 2**30)
    # 309 B parameters in two bytes.
    with pytest.raises(CheckpointError, match=r"take 575\.\d GiB in bfloat16, only 100\.0 GiB are free"):
        init_model(tmp_path / "flash", "flash")
    assert list(tmp_path.iterdir()) == []


def test_too_little_memory_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "free_disk_bytes", lambda path: 2**60)
    monkeypatch.setattr(module, "memory_bytes", lambda: Memory(16 * 2**30, 8 * 2**30))
    # One block in fp32: 256 experts x 3 x 4096 x 2048 x 4 bytes = 24 GiB, and some.
    with pytest.raises(CheckpointError, match=r"largest block takes 24\.\d GiB of memory, only 8\.0 GiB"):
        init_model(tmp_path / "flash", "flash")
    assert list(tmp_path.iterdir()) == []


def test_a_failure_while_writing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: PartwiseWeights) -> list[TensorEntry]:
        def produce() -> torch.Tensor:
            raise OSError(28, "No space left on device")

        return [tensor_entry("a", torch.zeros(2)), TensorEntry("b", torch.float32, (2,), produce)]

    monkeypatch.setattr(PartwiseWeights, "entries", fail)
    with pytest.raises(CheckpointError, match="No space left"):
        init_model(tmp_path / "model", "tiny", tokenizer_texts=words())
    assert list(tmp_path.iterdir()) == []
