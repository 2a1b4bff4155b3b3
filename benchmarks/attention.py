"""One attention layer, forward and forward + backward: `sdpa` against the dense reference and torch's fused kernel.

Released head widths (q and k 192, v 128), window 128, a trained sink on sliding layers. All contenders of a line are
measured in the same run, so read the ratios. The reference is left out where its T x T matrices would not fit; the
fused kernel (`scaled_dot_product_attention` per document, v padded to the width of q) can only do full layers.

    python benchmarks/attention.py [--quick] [--tokens 1024,4096,16384] [--heads 8] [--kv-heads 2] [--threads N]
"""

import argparse
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from measure import measure
from torch import Tensor

from automimo.attention import attend, build_layout

WIDTH, VALUE_WIDTH, WINDOW = 192, 128, 128
SCALE = WIDTH**-0.5
DOCUMENTS = {"one": None, "~1k": 1000, "~32": 32}


def boundaries(tokens: int, mean: int | None) -> list[int]:
    """Cumulative lengths of documents between a quarter and seven quarters of the mean."""
    generator = torch.Generator().manual_seed(0)
    bounds = [0]
    while bounds[-1] < tokens:
        length = tokens if mean is None else int(torch.randint(mean // 4, 7 * mean // 4 + 1, (1,), generator=generator))
        bounds.append(min(tokens, bounds[-1] + length))
    return bounds


class Layer:
    """The inputs of one layer, and each contender as a function of (q, k, v)."""

    def __init__(
        self, tokens: int, mean: int | None, window: int | None, dtype: torch.dtype, heads: int, kv: int
    ) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        self.leaves = [normal(tokens, heads, WIDTH), normal(tokens, kv, WIDTH), normal(tokens, kv, VALUE_WIDTH)]
        self.sink = torch.randn(heads, generator=generator) if window else None
        for leaf in [*self.leaves, *([] if self.sink is None else [self.sink])]:
            leaf.requires_grad_()
        self.dout = normal(tokens, heads, VALUE_WIDTH)
        self.window = window
        self.bounds = boundaries(tokens, mean)
        self.layout = build_layout(self.bounds, window=WINDOW)

    def tiled(self) -> Tensor:
        return self.attend("sdpa")

    def eager(self) -> Tensor:
        return self.attend("eager")

    def attend(self, backend: str) -> Tensor:
        q, k, v = self.leaves
        return attend(q, k, v, layout=self.layout, window=self.window, sink=self.sink, scale=SCALE, backend=backend)

    def fused(self) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in self.leaves)
        v = F.pad(v, (0, WIDTH - VALUE_WIDTH))
        outs = [
            F.scaled_dot_product_attention(
                q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], is_causal=True, scale=SCALE, enable_gqa=True
            )
            for a, b in pairwise(self.bounds)
        ]
        return torch.cat(outs, dim=2)[0, ..., :VALUE_WIDTH].transpose(0, 1)

    def forward(self, contender: Callable[[], Tensor]) -> None:
        with torch.no_grad():
            contender()

    def forward_backward(self, contender: Callable[[], Tensor]) -> None:
        contender().backward(self.dout)
        for leaf in self.leaves:
            leaf.grad = None


def reference_fits(tokens: int, heads: int) -> bool:
    """Eight score matrices in fp32 (products, masked, probabilities, their gradients) within half the free memory."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    return 8 * 4 * heads * tokens * tokens < free / 2


def print_case(kind: str, dtype: torch.dtype, tokens: int, documents: str, options: argparse.Namespace) -> None:
    window = WINDOW if kind == "sliding" else None
    layer = Layer(tokens, DOCUMENTS[documents], window, dtype, options.heads, options.kv_heads)
    repeats = 1 if options.quick else 5 if tokens <= 1024 else 3 if tokens < 8192 else 1
    forward, _ = measure(lambda: layer.forward(layer.tiled), repeats)
    both, peak = measure(lambda: layer.forward_backward(layer.tiled), repeats)
    name = f"{kind:8} {str(dtype).removeprefix('torch.'):9} {tokens:6} {documents:>4}"
    line = f"{name} | {forward * 1e3:8.1f} {both * 1e3:8.1f} ms {peak:7.0f} MiB |"
    if reference_fits(tokens, options.heads):
        seconds, mib = measure(lambda: layer.forward_backward(layer.eager), repeats)
        # Below a MiB the allocator's own pages decide, not the algorithm.
        line += f" {seconds * 1e3:8.1f} ms {mib:7.0f} MiB {seconds / both:6.1f}x {mib / max(peak, 1.0):6.1f}x |"
    else:
        line += f" {'does not fit':>38} |"
    if window is None and documents != "~32":
        seconds, mib = measure(lambda: layer.forward_backward(layer.fused), repeats)
        line += f" {seconds * 1e3:8.1f} ms {seconds / both:6.2f}x"
    print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="128 tokens only: does it run, not how fast it is")
    parser.add_argument("--tokens", default="1024,4096,16384", help="comma-separated stream lengths")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    sizes = [128] if options.quick else [int(tokens) for tokens in options.tokens.split(",")]

    heads = f"{options.heads} query heads, {options.kv_heads} key/value heads"
    print(f"{heads}, {options.threads} threads, torch {torch.__version__}; x: how many times ours")
    print(f"{'':30} | {'sdpa: forward, + backward, peak':>34} | {'eager: forward + backward, peak':>38} | fused kernel")
    for dtype in (torch.float32, torch.bfloat16):
        for kind in ("sliding", "full"):
            for tokens in sizes:
                for documents in DOCUMENTS:
                    print_case(kind, dtype, tokens, documents, options)


if __name__ == "__main__":
    main()
