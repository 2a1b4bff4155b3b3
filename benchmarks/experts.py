"""One mixture-of-experts layer, forward + backward: ours, grouped and as a loop, against transformers' own layer.

Same weights, same input, one run; the sides take turns, so that a busy machine slows all of them alike, and the best of
the turns counts. Before anything is timed, the outputs are compared.

    python benchmarks/experts.py [--quick] [--threads N]
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor, nn
from transformers import MiMoV2FlashConfig
from transformers.models.mimo_v2_flash.modeling_mimo_v2_flash import MiMoV2FlashMoE

from automimo.moe import MoE, MoEConfig


@dataclass(frozen=True)
class Case:
    experts: int
    hidden: int
    inter: int
    tokens: int
    chosen: int = 8


def ours(case: Case, dtype: torch.dtype, backend: str) -> nn.Module:
    config = MoEConfig(
        n_routed_experts=case.experts,
        n_shared_experts=None,
        n_activated_experts=case.chosen,
        n_expert_groups=1,
        n_limited_groups=1,
        train_gate=True,
        gate_bias_update_factor=0.0,
        aux_loss_coeff=0.0,
        score_func="sigmoid_with_bias",
        route_scale=None,
        dim=case.hidden,
        inter_dim=case.inter,
        moe_inter_dim=case.inter,
        norm_topk_prob=True,
        dtype=str(dtype),
    )
    return MoE(config, backend)


def native(case: Case, dtype: torch.dtype, implementation: str, source: MoE) -> nn.Module:
    config = MiMoV2FlashConfig(
        hidden_size=case.hidden,
        moe_intermediate_size=case.inter,
        n_routed_experts=case.experts,
        num_experts_per_tok=case.chosen,
        norm_topk_prob=True,
    )
    config._experts_implementation = implementation
    layer = MiMoV2FlashMoE(config)
    layer.experts.to(dtype)
    with torch.no_grad():
        layer.gate.weight.copy_(source.gate.weight)
        layer.gate.e_score_correction_bias.zero_()
        layer.experts.gate_up_proj.copy_(source.experts.gate_and_up_projs.transpose(1, 2))
        layer.experts.down_proj.copy_(source.experts.down_projs.transpose(1, 2))
    return layer


def run_case(case: Case, dtype: torch.dtype, turns: int) -> None:
    torch.manual_seed(0)
    grouped = ours(case, dtype, "torch_mm")
    loop = ours(case, dtype, "torch")
    loop.load_state_dict(grouped.state_dict())
    assert isinstance(grouped, MoE)
    sides: dict[str, Callable[[Tensor], Tensor]] = {
        "ours, grouped": lambda x: grouped(x)[0],
        "ours, loop": lambda x: loop(x)[0],
    }
    layers = [grouped, loop]
    for implementation in ("grouped_mm", "eager"):
        layers.append(native(case, dtype, implementation, grouped))
        sides[f"transformers, {implementation}"] = lambda x, layer=layers[-1]: layer(x.unsqueeze(0)).squeeze(0)
    x = torch.randn(case.tokens, case.hidden).to(dtype).requires_grad_()
    grad = torch.randn(case.tokens, case.hidden).to(dtype)

    def step(forward: Callable[[Tensor], Tensor]) -> float:
        for layer in layers:
            layer.zero_grad(set_to_none=True)
        x.grad = None
        start = time.perf_counter()
        forward(x).backward(grad)
        return time.perf_counter() - start

    with torch.no_grad():
        outputs = {name: forward(x).float() for name, forward in sides.items()}
    norm = outputs["ours, grouped"].norm()
    apart = {name: float((out - outputs["ours, grouped"]).norm() / norm) for name, out in outputs.items()}
    seconds = {name: [] for name in sides}
    for _turn, (name, forward) in product(range(turns + 1), sides.items()):
        seconds[name].append(step(forward))
    best = {name: min(times[1:]) for name, times in seconds.items()}
    print(f"{case}, {dtype}")
    for name, value in best.items():
        ratio = value / best["ours, grouped"]
        print(f"  {name:26} {value * 1e3:9.1f} ms  x{ratio:5.2f}  output differs by {apart[name]:.1e}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small case")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    cases = [Case(64, 256, 128, 4096), Case(256, 256, 128, 4096), Case(8, 256, 256, 4096, 2)]
    if options.quick:
        cases = [Case(64, 256, 128, 1024)]
    for case, dtype in product(cases, (torch.float32, torch.bfloat16)):
        run_case(case, dtype, turns=3 if options.quick else 5)


if __name__ == "__main__":
    main()
