"""One optimizer step of a long row on one rank and shared by several (`parallel.context`): memory, time, bytes.

Every process has one thread. Memory is the peak of a rank above what it had after importing torch and AutoMiMo, so it
holds the model, its optimizer state and everything of a step. The same step with the heads exchanged in every layer
shows what the halo of sliding layers saves. Bytes are what a rank sends in one forward pass of a layer; backward sends
them again, the other way. The losses of all are printed as their largest difference: it is the same training.

    python benchmarks/context_parallel.py [--quick] [--ranks 2] [--tokens 16384] [--documents 1] [--rounds 3]
"""

import argparse
import json
import os
from dataclasses import dataclass, field
from typing import Any

# Before torch is imported.
os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
from measure import peak_mib, reset_peak, spawn_ranks
from steps import timed_steps
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from automimo.attention import halo
from automimo.data import DataStream, Example
from automimo.distributed.mesh import build_meshes, infer_sizes
from automimo.distributed.world import open_world
from automimo.mimo_v2_flash.model import MiMoV2FlashForCausalLM
from automimo.mimo_v2_flash.presets import preset_config
from automimo.parallelize import ParallelConfig, parallelize
from automimo.training.evaluation import batch_loss
from automimo.training.place import Place

# The released widths of heads and window; an eighth of the heads, of which a step of 16k tokens fits a laptop.
CHANGES: dict[str, object] = {
    **{"hidden_size": 256, "intermediate_size": 1024, "moe_intermediate_size": 128, "vocab_size": 8192},
    **{"num_hidden_layers": 6, "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0], "moe_layer_freq": [0, 1, 1, 1, 1, 1]},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 192, "v_head_dim": 128},
    **{"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 192, "swa_v_head_dim": 128},
    "sliding_window": 128,
}


# glibc keeps freed blocks below a threshold that grows by itself, up to 32 MiB, and what lies about that way depends on
# the sizes of tensors more than on what a step needs: of one process 940 MiB, of two 700 MiB each. A fixed threshold
# gives them back, for about a seventh more time.
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(128 * 1024)}


@dataclass
class CountSent(TorchDispatchMode):
    """Bytes that this rank sends to others by all-to-alls in forward, by the kind of the layer that is running."""

    rank: int
    sent: dict[str, int] = field(default_factory=dict)
    layer: str = ""

    def __post_init__(self) -> None:
        super().__init__()

    def watch(self, model: MiMoV2FlashForCausalLM) -> None:
        """Know which layer's attention runs."""
        for block in model.model.layers.values():
            block.self_attn.register_forward_pre_hook(lambda *_, kind=block.attention_type: self._enter(kind))
            block.self_attn.register_forward_hook(lambda *_: self._enter(""))

    def _enter(self, kind: str) -> None:
        self.layer = kind

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is torch.ops._c10d_functional.all_to_all_single.default and self.layer:
            rows, leaving = args[0], sum(args[2]) - args[2][self.rank]
            self.sent[self.layer] = self.sent.get(self.layer, 0) + leaving * rows[:1].numel() * rows.element_size()
        return op(*args, **(kwargs or {}))


def make_model() -> MiMoV2FlashForCausalLM:
    torch.manual_seed(0)
    model = MiMoV2FlashForCausalLM(preset_config("tiny", **CHANGES))
    model.initialize_weights(dtype=torch.float32)
    return model.train()


def make_stream(tokens: int, documents: int, vocabulary: int) -> DataStream:
    """Rows of equally long documents."""
    rng = np.random.default_rng(0)
    length = tokens // documents
    examples = [
        Example(rng.integers(0, vocabulary, length).astype(np.int32), np.ones(length, bool), f"{i}")
        for i in range(8 * documents)
    ]
    return DataStream(examples, sequence_length=tokens)


def measure(request: dict) -> dict[str, Any]:
    """Seconds of the best step after one that warms up, peak MiB above the imports, loss, bytes by kind of layer."""
    reset_peak()
    imported = peak_mib()
    if not request["halo"]:
        halo.HALO_LIMIT = 0.0  # no halo is small enough
    with open_world(600) as world:
        model = make_model()
        place, kinds = Place(), [block.attention_type for block in model.model.layers.values()]
        if world.size > 1:
            sizes = infer_sizes(world.size, n_experts=model.config.n_routed_experts, context=world.size)
            place = Place.of(world.rank, sizes)
            parallelize(model, build_meshes(sizes, "cpu"), ParallelConfig())
        data = make_stream(request["tokens"], request["documents"], model.config.vocab_size)
        batches = (place.micro_batches(data, data.next_rows(1), 1) for _ in range(request["steps"] + 1))
        seconds, loss = timed_steps(model, torch.float32, batches)
        memory = peak_mib() - imported
        counted = CountSent(world.rank)
        counted.watch(model)
        with counted, torch.no_grad():
            batch_loss(model, place.micro_batches(data, data.next_rows(1), 1)[0], 1024)
    per_layer = {kind: total / kinds.count(kind) for kind, total in counted.sent.items()}
    return {"seconds": seconds, "mib": memory, "loss": loss, "bytes": per_layer}


def describe(name: str, results: list[list[dict[str, Any]]], alone: dict[str, float] | None) -> dict[str, float]:
    """Print a layout's line: the slowest rank of the best round, the rank with the most memory."""
    seconds = min(max(result["seconds"] for result in ranks) for ranks in results)
    mib = min(max(result["mib"] for result in ranks) for ranks in results)
    line = f"  {name:<34} {seconds:7.2f} s  {mib:8,.0f} MiB per rank"
    if alone is not None:
        line += f"   time {alone['seconds'] / seconds:.2f}x   memory {alone['mib'] / mib:.2f}x"
        sent = results[0][0]["bytes"]
        line += "".join(f"   {kind.split('_')[0]} {sent.get(kind, 0) / 2**20:.1f} MiB" for kind in sorted(sent))
    print(line, flush=True)
    return {"seconds": seconds, "mib": mib}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--documents", type=int, default=1, help="equally long documents of a row")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a short row, one round, to see that it runs")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        torch.set_num_threads(1)
        print(json.dumps(measure(json.loads(arguments.measure))))
        return
    tokens, rounds = (2048, 1) if arguments.quick else (arguments.tokens, arguments.rounds)
    ranks = arguments.ranks
    request = {"tokens": tokens, "documents": arguments.documents, "steps": 1}
    layouts = {
        "one process": (1, True),
        f"context {ranks}": (ranks, True),
        f"context {ranks}, heads in every layer": (ranks, False),
    }
    found: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in layouts}
    for _ in range(rounds):
        for name, (size, with_halo) in layouts.items():
            found[name].append(spawn_ranks(__file__, {**request, "halo": with_halo}, size, GIVE_BACK))
    losses = [result["loss"] for rounds_ in found.values() for results in rounds_ for result in results]
    values = sum(p.numel() for p in nn.Module.parameters(make_model()))
    print(
        f"torch {torch.__version__}, fp32, gloo, one thread per process; {values / 1e6:.1f} M parameters, one row of "
        f"{tokens:,} tokens in {arguments.documents} documents; losses within "
        f"{(max(losses) - min(losses)) / losses[0]:.0e}"
    )
    alone = None
    for name, results in found.items():
        line = describe(name, results, alone)
        alone = alone or line


if __name__ == "__main__":
    main()
