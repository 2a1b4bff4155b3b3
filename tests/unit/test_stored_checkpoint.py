"""Folders in every released form, written by an independent oracle, read as the split layout."""

from pathlib import Path

import pytest
import torch
from released_folders import released
from released_forms import CASES, open_stored, options_of
from released_oracle import Shape

from automimo.checkpoint import CheckpointReader

MEDIA = ("visual.", "audio_encoder.", "speech_embeddings.")


@pytest.mark.parametrize(("shape", "form"), CASES)
def test_every_tensor_reads_as_the_oracle_decodes_it(tmp_path: Path, shape: Shape, form: str) -> None:
    decoded = released(tmp_path / "model", shape, form, shards=2)
    with CheckpointReader(tmp_path / "model") as reader:
        stored = open_stored(reader, options_of(shape, form))
        text = {key: value for key, value in decoded.items() if not key.startswith(MEDIA)}
        assert stored.matrices.keys() == text.keys()
        assert sorted(stored.raw) == sorted(key for key in decoded if key.startswith(MEDIA))
        for key, expected in text.items():
            assert torch.equal(stored.read(key, torch.float32), expected), key
            assert torch.equal(stored.read(key, torch.bfloat16), expected.to(torch.bfloat16)), key
            strided = torch.full(expected.shape[::-1], torch.nan).permute(*range(expected.dim())[::-1])
            stored.read_into(key, strided)
            assert torch.equal(strided, expected), key
