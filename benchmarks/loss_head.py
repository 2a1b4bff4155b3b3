"""Vocabulary projection + cross entropy, forward + backward: full logits against our chunks, time and peak memory.

Each variant is a process of its own, so that its peak memory is its own. Memory counts from where weight and hidden
states are there; the gradient of the weight (V x H) is part of every row.

    python benchmarks/loss_head.py [--quick] [--threads N]
"""

import argparse
import json
import subprocess
import sys

import torch
from measure import measure
from torch.nn import functional as F

from automimo.mimo_v2_flash.lm_head import LMHead

FULL = 0


def run_variant(tokens: int, hidden_size: int, vocabulary: int, dtype: str, chunk: int) -> dict[str, float]:
    """Best seconds, peak MiB, and the loss of one variant; chunk 0 is full logits."""
    torch.manual_seed(0)
    head = LMHead(hidden_size, vocabulary, dtype=getattr(torch, dtype))
    hidden = torch.randn(tokens, hidden_size, dtype=getattr(torch, dtype)).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,))
    losses = []

    def step() -> None:
        if chunk == FULL:
            loss = F.cross_entropy(head(hidden).float(), targets, reduction="sum")
        else:
            loss = head(hidden, targets, chunk)
        (loss / tokens).backward()
        losses.append(loss.item() / tokens)
        hidden.grad = head.weight.grad = None  # so that the peak counts this step's gradients

    seconds, mib = measure(step, repeats=2)
    return {"seconds": seconds, "mib": mib, "loss": losses[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a quarter of the tokens, hidden width 256")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--variant", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.variant:
        print(json.dumps(run_variant(**options.variant)))
        return
    tokens, hidden_size, vocabulary = (512, 256, 152576) if options.quick else (2048, 512, 152576)
    print(f"{tokens} tokens, hidden {hidden_size}, vocabulary {vocabulary}, {options.threads} threads")
    for dtype in ("float32", "bfloat16"):
        base = None
        for chunk in (FULL, 128, 256, 512, 1024):
            if chunk >= tokens:
                continue
            variant = {"tokens": tokens, "hidden_size": hidden_size, "vocabulary": vocabulary}
            variant |= {"dtype": dtype, "chunk": chunk}
            command = [sys.executable, __file__, "--threads", str(options.threads), "--variant", json.dumps(variant)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            result = json.loads(done.stdout)
            base = base or result
            name = "full logits" if chunk == FULL else f"chunk {chunk}"
            print(
                f"  {dtype:8} {name:12} {result['seconds']:6.2f} s  x{base['seconds'] / result['seconds']:4.2f}"
                f"  {result['mib']:6.0f} MiB  /{base['mib'] / result['mib']:4.1f}  loss {result['loss']:.6f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
