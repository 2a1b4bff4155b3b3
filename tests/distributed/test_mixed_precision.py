"""bf16 compute over fp32 masters: what is rounded, what is not, and how far the result is from fp32."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from toy import EXPERTS, Case, batches, make_model, one_process, stream

from automimo.distributed.mesh import build_meshes, infer_sizes
from automimo.mimo_v2_flash.attention import MiMoV2FlashAttention
from automimo.moe import GroupedExperts
from automimo.moe.gate import Gate
from automimo.parallelize import ParallelConfig, parallelize
from automimo.training.optimizer import make_optimizer
from automimo.training.place import Place
from automimo.training.precision import MasterWeights
from automimo.training.recipe import OptimSection
from automimo.training.step import train_step


def train_in_bf16(rank: int, mesh: dict[str, int], batch: int) -> tuple[list[float], dict[str, set[str]]]:
    """Losses of five steps, and the dtypes seen inside the forward passes."""
    case = Case(mesh, batch=batch)
    model = make_model(case)
    sizes = infer_sizes(dist.get_world_size(), n_experts=EXPERTS, **mesh)
    parallelize(model, build_meshes(sizes, "cpu"), ParallelConfig(dtype=torch.bfloat16))
    place = Place.of(rank, sizes)
    seen: dict[str, set[str]] = {}

    def note(name: str, tensor: torch.Tensor) -> None:
        seen.setdefault(name, set()).add(str(tensor.dtype).removeprefix("torch."))

    def look(module: torch.nn.Module, inputs: tuple, output: object) -> None:
        if isinstance(module, Gate):
            note("router weight", module.weight)
            note("router bias", module.e_score_correction_bias)
            note("router output", output.weights_TK)
            note("router input", inputs[0])
        elif isinstance(module, MiMoV2FlashAttention):
            note("sink", module.attention_sink_bias)
            note("query projection", module.q_proj.weight)
            note("rotary table", inputs[1][0])
        elif isinstance(module, GroupedExperts):
            note("experts", module.down_projs)

    for module in model.modules():
        # Before FSDP's own hooks free what they have gathered.
        module.register_forward_hook(look, prepend=True)
    masters = MasterWeights(model, torch.float32)
    optimizer = make_optimizer(masters.trainable, OptimSection(lr=3e-3))

    def look_at_gradients(*_: object) -> None:
        for parameter in masters.trainable.values():
            note("gradient", parameter.grad)

    optimizer.register_step_pre_hook(look_at_gradients)
    data = stream()
    losses = []
    for step in range(1, 6):
        result = train_step(
            model, masters, optimizer, batches(data, case, place),
            lr_factor=1.0, clip_norm=None, loss_chunk=16, update_bias=True, step=step,
        )  # fmt: skip
        losses.append(result.loss)
    for parameter in masters.by_name.values():
        note("master", parameter)
    for state in optimizer.state.values():
        note("moment", state["exp_avg"])
    return losses, seen


@pytest.mark.parametrize(
    ("ranks", "mesh", "batch"),
    [
        (2, {"expert": 2}, 6),
        (4, {"replicate": 2, "expert": 2}, 4),
        pytest.param(2, {"context": 2, "expert": 2}, 3, marks=pytest.mark.slow),
    ],
)
def test_router_and_sinks_stay_fp32_inside_forward(ranks, mesh, batch):
    answers = run_ranks(ranks, train_in_bf16, mesh, batch)
    reference = one_process(Case(mesh, batch=batch)).losses
    for losses, seen in answers:
        assert seen == {
            "router weight": {"float32"},
            "router bias": {"float32"},
            "router output": {"float32"},
            "router input": {"bfloat16"},
            "sink": {"float32"},
            "query projection": {"bfloat16"},
            "rotary table": {"bfloat16"},
            "experts": {"bfloat16"},
            "gradient": {"float32"},
            "master": {"float32"},
            "moment": {"float32"},
        }
        assert losses == answers[0][0]
        # bf16 has 8 bits: the loss of a few layers is off by well below 1 in 100, not by the size of what is learned.
        assert losses == pytest.approx(reference, rel=1e-2)
