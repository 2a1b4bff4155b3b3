"""One training step (forward, backward, AdamW) of AutoMiMo against transformers' native MiMoV2FlashForCausalLM.

Same weights, same batch, same machine, one run. Every measurement is a process of its own, so that its peak memory is
its own; the two sides alternate. The reference runs in its fastest setting that works on a CPU: `eager` attention (it
has no other here) and the faster of its `eager` and `grouped_mm` experts (at 16k tokens only the latter). At 16k tokens
it needs activation checkpointing to fit into memory; ours does not and runs without.

    python benchmarks/train_step.py [--quick] [--dtype float32|bfloat16] [--cases 1k,4k,16k]
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import torch
from measure import peak_mib, reset_peak
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """Tokens of the batch, document length (None: one document), layers and query heads of the model."""

    name: str
    tokens: int
    document: int | None
    layers: int
    heads: int
    reference_checkpointing: bool
    steps: int


VOCABULARY = 4768  # 152,576 * 2 / 64

CASES = {
    "1k": [Case("1k, one document", 1024, None, 8, 8, False, 4), Case("1k, packed by 256", 1024, 256, 8, 8, False, 4)],
    "4k": [Case("4k, one document", 4096, None, 6, 4, False, 2), Case("4k, packed by 1k", 4096, 1024, 6, 4, False, 2)],
    "16k": [
        Case("16k, one document", 16384, None, 4, 2, True, 1),
        Case("16k, packed by 1k", 16384, 1024, 4, 2, True, 1),
    ],
    "quick": [Case("256, one document", 256, None, 4, 2, True, 1), Case("256, packed by 64", 256, 64, 4, 2, True, 1)],
}


def model_config(case: Case) -> dict:
    """V2-Flash with every width scaled by 2/64, as the 16k case scales heads; the others have more layers, heads.

    Head widths and window are the released ones; key-value heads as few as the reference's rule (sliding = 2 x full)
    allows; 32 experts instead of 256, still 8 per token.
    """
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 512,
        "moe_intermediate_size": 64,
        "num_hidden_layers": case.layers,
        # One full layer in four, as near to the released one in six as four layers allow.
        "hybrid_layer_pattern": [int(i % 4 != 0) for i in range(case.layers)],
        "num_attention_heads": case.heads,
        "num_key_value_heads": 1,
        "swa_num_attention_heads": case.heads,
        "swa_num_key_value_heads": 2,
        "sliding_window": 128,
        "n_routed_experts": 32,
        "num_experts_per_tok": 8,
    }


def boundaries(case: Case) -> list[int]:
    """Cumulative document lengths; packed documents vary by a quarter around the nominal length."""
    if case.document is None:
        return [0, case.tokens]
    generator = torch.Generator().manual_seed(0)
    bounds = [0]
    while bounds[-1] < case.tokens:
        spread = case.document // 4
        length = case.document + int(torch.randint(-spread, spread + 1, (1,), generator=generator))
        bounds.append(min(bounds[-1] + length, case.tokens))
    return bounds


def build(side: str, folder: str, case: Case, dtype: torch.dtype) -> torch.nn.Module:
    if side == "ours":
        from automimo.mimo_v2_flash.model import MiMoV2FlashForCausalLM

        return MiMoV2FlashForCausalLM.from_pretrained(folder, dtype=dtype).train()
    from transformers.models.mimo_v2_flash import MiMoV2FlashForCausalLM as Native

    experts = side.removeprefix("transformers ")
    model = Native.from_pretrained(folder, dtype=dtype, attn_implementation="eager", experts_implementation=experts)
    if case.reference_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("sinks" not in name)  # ours freezes sinks by default
    return model.train()


def loss_of(side: str, model: torch.nn.Module, ids_T: Tensor, bounds: list[int]) -> Tensor:
    targets_T = torch.cat((ids_T[1:], ids_T.new_full((1,), -100)))
    targets_T[torch.tensor(bounds[1:]) - 1] = -100
    valid = int((targets_T != -100).sum())
    if side == "ours":
        cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
        return model(ids_T, cu_seqlens=cu_seqlens, targets=targets_T).loss / valid
    positions = torch.cat([torch.arange(b - a) for a, b in pairwise(bounds)])
    logits = model(ids_T.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False).logits[0]
    return torch.nn.functional.cross_entropy(logits.float(), targets_T, ignore_index=-100)


def measure(side: str, folder: str, case: Case, dtype: torch.dtype) -> dict:
    """Best seconds of a step after a warm-up, peak memory above the built model with its optimizer, and the loss."""
    model = build(side, folder, case, dtype)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, foreach=True)
    ids_T = torch.randint(0, VOCABULARY, (case.tokens,), generator=torch.Generator().manual_seed(1))
    bounds = boundaries(case)

    def step(ids_T: Tensor, bounds: list[int]) -> float:
        loss = loss_of(side, model, ids_T, bounds)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    step(ids_T[:128], [0, 128])  # allocates optimizer state and warms up the kernels
    # The first full step is the measured one where a step takes a minute.
    if case.steps > 1:
        step(ids_T, bounds)
    reset_peak()
    before = peak_mib()
    seconds, losses = [], []
    for _ in range(case.steps):
        start = time.perf_counter()
        losses.append(step(ids_T, bounds))
        seconds.append(time.perf_counter() - start)
    return {"seconds": min(seconds), "mib": peak_mib() - before, "loss": losses[0]}


def run_case(case: Case, dtype: str) -> dict[str, dict]:
    """Measure all sides of a case, each in a process of its own."""
    sides = ["ours", "transformers grouped_mm"]
    if not case.reference_checkpointing:
        # Where a step takes minutes, only the experts that were faster in every smaller case.
        sides.append("transformers eager")
    with tempfile.TemporaryDirectory() as scratch:
        folder = str(Path(scratch) / "model")
        save_model(case, folder)
        return {side: spawn(side, folder, case, dtype) for side in sides}


def print_growth(dtype: str) -> None:
    """Our peak memory and time on the model of the 16k case at 4k, 8k and 16k tokens, one document."""
    print("ours, 4 layers, 2 heads, one document:")
    for tokens in (4096, 8192, 16384):
        case = Case(f"{tokens}", tokens, None, 4, 2, False, 1)
        with tempfile.TemporaryDirectory() as scratch:
            folder = str(Path(scratch) / "model")
            save_model(case, folder)
            result = spawn("ours", folder, case, dtype)
        print(f"{tokens:6} tokens  {result['seconds']:6.2f} s  {result['mib']:6.0f} MiB", flush=True)


def save_model(case: Case, folder: str) -> None:
    from automimo.mimo_v2_flash.config import MiMoV2FlashConfig
    from automimo.mimo_v2_flash.model import MiMoV2FlashForCausalLM

    torch.manual_seed(0)
    model = MiMoV2FlashForCausalLM(MiMoV2FlashConfig(**model_config(case), torch_dtype="float32"))
    model.initialize_weights(dtype=torch.float32)
    model.save_pretrained(folder)


def spawn(side: str, folder: str, case: Case, dtype: str) -> dict:
    request = json.dumps({"side": side, "folder": folder, "case": asdict(case), "dtype": dtype})
    done = subprocess.run([sys.executable, __file__, "--measure", request], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{side}, {case.name}: failed with {done.returncode}\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default="1k,4k,16k")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--quick", action="store_true", help="one small case, to see that it runs")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        request = json.loads(arguments.measure)
        case, dtype = Case(**request["case"]), getattr(torch, request["dtype"])
        print(json.dumps(measure(request["side"], request["folder"], case, dtype)))
        return
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {arguments.dtype}; "
        "time and peak memory of a training step"
    )
    header = (
        f"{'case':20} {'layers/heads':>12} {'ours':>18} {'transformers':>20} {'experts':>11} {'time':>7} {'memory':>7}"
    )
    print(header)
    for name in ["quick"] if arguments.quick else arguments.cases.split(","):
        for case in CASES[name]:
            results = run_case(case, arguments.dtype)
            ours = results.pop("ours")
            side, best = min(results.items(), key=lambda item: item[1]["seconds"])
            gap = abs(ours["loss"] - best["loss"])
            note = " (activation checkpointing on the reference)" if case.reference_checkpointing else ""
            print(
                f"{case.name:20} {f'{case.layers}/{case.heads}':>12} "
                f"{ours['seconds']:8.2f} s {ours['mib']:5.0f} MiB {best['seconds']:8.2f} s {best['mib']:7.0f} MiB "
                f"{side.removeprefix('transformers '):>11} {best['seconds'] / ours['seconds']:6.1f}x "
                f"{best['mib'] / ours['mib']:6.1f}x  loss gap {gap:.1e}{note}",
                flush=True,
            )
    if not arguments.quick:
        print_growth(arguments.dtype)


if __name__ == "__main__":
    main()
