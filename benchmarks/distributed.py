"""One optimizer step in several processes against the same step, on the same rows, in one: parallel efficiency.

Every process has one thread, so N processes have N times the cores of one; efficiency is
seconds(1) / (N x seconds(N)), 1.0 where nothing is lost to communication, waiting or shared memory bandwidth. The
layouts alternate over several rounds of one run and the best step of each counts. The loss of the first step is printed
as the largest difference to one process: it is the same training.

    python benchmarks/distributed.py [--quick] [--ranks 2] [--rounds 3] [--dtype float32|bfloat16]
"""

import argparse
import json
import os
from dataclasses import dataclass

# Before torch is imported.
os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
from measure import spawn_ranks
from steps import timed_steps

from automimo.data import DataStream, Example
from automimo.distributed.mesh import build_meshes, infer_sizes
from automimo.distributed.world import open_world
from automimo.mimo_v2_flash.model import MiMoV2FlashForCausalLM
from automimo.mimo_v2_flash.presets import preset_config
from automimo.parallelize import ParallelConfig, parallelize
from automimo.training.place import Place


@dataclass(frozen=True)
class Model:
    """rows of `length` tokens per step, `micro` of them per forward pass; `changes` to the tiny preset."""

    rows: int
    micro: int
    length: int
    changes: dict[str, object]


MODELS = {
    "quickstart": Model(8, 2, 1024, {}),
    "larger": Model(
        8,
        2,
        1024,
        {
            "hidden_size": 512,
            "intermediate_size": 2048,
            "moe_intermediate_size": 256,
            "num_hidden_layers": 8,
            "hybrid_layer_pattern": [0, 1, 1, 1, 0, 1, 1, 0],
            "moe_layer_freq": [0] + [1] * 7,
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "vocab_size": 16384,
        },
    ),
}
QUICK = Model(2, 1, 64, {})
LAYOUTS = {"one process": {}, "dp": {}, "ep": {"expert": 0}}  # 0: all ranks


def make_model(settings: Model) -> MiMoV2FlashForCausalLM:
    torch.manual_seed(0)
    model = MiMoV2FlashForCausalLM(preset_config("tiny", **settings.changes))
    model.initialize_weights(dtype=torch.float32)
    return model.train()


def make_stream(settings: Model, vocabulary: int) -> DataStream:
    """Full rows of two documents each."""
    rng = np.random.default_rng(0)
    length = settings.length // 2
    examples = [
        Example(rng.integers(0, vocabulary, length).astype(np.int32), np.ones(length, bool), f"{i}") for i in range(256)
    ]
    return DataStream(examples, sequence_length=settings.length)


def measure(settings: Model, layout: str, steps: int, dtype: torch.dtype) -> dict[str, float]:
    """Best seconds of a step after one that warms up (slowest rank), parameters, and the loss of the first step."""
    with open_world(600) as world:
        model = make_model(settings)
        total = sum(p.numel() for p in model.parameters())
        masters_dtype, place = dtype, Place()
        if world.size > 1:
            given = {key: value or world.size for key, value in LAYOUTS[layout].items()}
            sizes = infer_sizes(world.size, n_experts=model.config.n_routed_experts, **given)
            place = Place.of(world.rank, sizes)
            parallelize(model, build_meshes(sizes, "cpu"), ParallelConfig(dtype=dtype))
            masters_dtype = torch.float32
        data = make_stream(settings, model.config.vocab_size)
        batches = (place.micro_batches(data, data.next_rows(settings.rows), settings.micro) for _ in range(steps + 1))
        seconds, loss = timed_steps(model, masters_dtype, batches)
    return {"seconds": seconds, "parameters": total, "loss": loss}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--quick", action="store_true", help="two short rows, one round, to see that it runs")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        torch.set_num_threads(1)
        request = json.loads(arguments.measure)
        settings = QUICK if request["quick"] else MODELS[request["model"]]
        dtype = getattr(torch, request["dtype"])
        print(json.dumps(measure(settings, request["layout"], request["steps"], dtype)))
        return
    ranks, rounds = arguments.ranks, 1 if arguments.quick else arguments.rounds
    print(f"torch {torch.__version__}, {arguments.dtype}, gloo, one thread per process, {ranks} processes against 1")
    for name in ["quickstart"] if arguments.quick else arguments.models.split(","):
        request = {"model": name, "steps": 1 if arguments.quick else 2, "dtype": arguments.dtype}
        request["quick"] = arguments.quick
        found: dict[str, list[dict[str, float]]] = {layout: [] for layout in LAYOUTS}
        for _ in range(rounds):
            for layout, results in found.items():
                size = 1 if layout == "one process" else ranks
                results.append(spawn_ranks(__file__, {**request, "layout": layout}, size)[0])
        best = {layout: min(result["seconds"] for result in results) for layout, results in found.items()}
        losses = [result["loss"] for results in found.values() for result in results]
        settings = QUICK if arguments.quick else MODELS[name]
        print(
            f"{name}: {found['dp'][0]['parameters'] / 1e6:.1f} M parameters, {settings.rows} rows of "
            f"{settings.length} tokens per step, losses within {(max(losses) - min(losses)) / losses[0]:.0e}"
        )
        alone = best.pop("one process")
        print(f"  one process   {alone:7.2f} s per step")
        for layout, seconds in best.items():
            efficiency = alone / (ranks * seconds)
            print(f"  {layout:3} {ranks} ranks   {seconds:7.2f} s per step   efficiency {efficiency:.2f}", flush=True)


if __name__ == "__main__":
    main()
