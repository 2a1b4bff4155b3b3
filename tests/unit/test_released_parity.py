"""transformers' own V2-Flash opens what `convert --to bf16` makes of the FP8 release, and computes what we compute."""

from pathlib import Path

import pytest
import torch
from released_folders import released
from released_oracle import NATIVE
from rich.console import Console
from transformers.models.mimo_v2_flash import MiMoV2FlashForCausalLM as NativeModel

from automimo.convert import ConvertOptions, convert_checkpoint
from automimo.mimo_v2_flash.model import MiMoV2FlashForCausalLM
from automimo.mimo_v2_flash.storage import SourceOptions


@pytest.mark.parametrize("form", ["fp8-flash", "bf16-fused"])
def test_transformers_computes_the_same_logits_from_our_export(tmp_path: Path, form: str) -> None:
    released(tmp_path / "release", NATIVE, form)
    source = SourceOptions(tp=NATIVE.checkpoint_tp if form == "bf16-fused" else None)
    if form == "bf16-fused":  # a V2-Flash in the fused layout: config.json of the split form, with the layout key
        released(tmp_path / "split", NATIVE, "bf16-split")
        (tmp_path / "release" / "config.json").write_bytes((tmp_path / "split" / "config.json").read_bytes())
    out = tmp_path / "bf16"
    convert_checkpoint(
        tmp_path / "release", out, ConvertOptions("bf16", source=source), console=Console(quiet=True), verify=True
    )
    native, loading = NativeModel.from_pretrained(
        out, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not loading["missing_keys"] and not loading["mismatched_keys"]
    assert {key for key in loading["unexpected_keys"] if not key.startswith("model.mtp.")} == set()
    # The released sliding_window_size 128 makes transformers' window 129; 24 tokens stay within either.
    input_ids = torch.randint(0, NATIVE.vocab_size, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = native(input_ids, use_cache=False).logits
        ours = MiMoV2FlashForCausalLM.from_pretrained(str(out), dtype=torch.float32)(input_ids).logits
        # The release itself, whose weights are the ones of the export before they were rounded to BF16.
        direct = (
            MiMoV2FlashForCausalLM.from_pretrained(
                str(tmp_path / "release"), dtype=torch.bfloat16, source_options=source
            )
            .to(torch.float32)(input_ids)
            .logits
        )
    assert float((ours - expected).abs().max()) <= 2e-5 * float(expected.abs().max())  # fp32, another order of sums
    assert torch.equal(direct, ours)
