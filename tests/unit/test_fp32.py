import pytest
import torch
from torch import nn

from automimo.fp32 import KeepFp32, compute_dtype, without_autocast


class Sensitive(KeepFp32):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))
        self.register_buffer("table", torch.rand(5), persistent=False)
        self.register_buffer("counts", torch.arange(3))
        self.register_buffer("nothing", None)
        self.child = nn.Linear(3, 3)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), Sensitive())


@pytest.mark.parametrize(
    "cast",
    [
        lambda m: m.to(torch.bfloat16),
        lambda m: m.bfloat16(),
        lambda m: m.half(),
        lambda m: m.to(dtype=torch.float16, device="cpu"),
        lambda m: m.half().float().bfloat16(),
    ],
)
def test_casts_pass_over_it(cast):
    model = make_model()
    kept = model[1]
    kept.weight.grad = torch.randn(4, 3)
    before = kept.weight.detach().clone(), kept.table.clone(), kept.weight.grad.clone()
    parameter = kept.weight
    cast(model)
    assert kept.weight is parameter
    for tensor, value in zip((kept.weight, kept.table, kept.weight.grad), before, strict=True):
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, value)
    assert kept.counts.dtype == torch.int64
    assert model[0].weight.dtype == kept.child.weight.dtype != torch.float32  # neighbours and children are cast


def test_double_widens_and_comes_back():
    kept = make_model()[1].double()
    assert kept.weight.dtype == kept.table.dtype == torch.float64
    kept.to(torch.bfloat16)
    assert kept.weight.dtype == kept.table.dtype == torch.float32


def test_device_moves_work():
    kept = make_model().to(torch.bfloat16).to("meta")[1]
    assert kept.weight.is_meta
    assert kept.weight.dtype == kept.table.dtype == torch.float32
    kept.to(torch.float16)
    kept.to_empty(device="cpu")
    assert kept.weight.device.type == kept.table.device.type == "cpu"
    assert kept.weight.dtype == kept.table.dtype == torch.float32
    assert isinstance(kept.weight, nn.Parameter)


def test_a_narrow_tensor_put_in_from_outside_is_raised_at_the_next_cast():
    kept = make_model()[1]
    state = {
        name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in kept.state_dict().items()
    }
    kept.load_state_dict(state, assign=True)
    assert kept.to(torch.bfloat16).weight.dtype == torch.float32


def test_autocast_helpers():
    x = torch.randn(4, 4)
    assert compute_dtype(x) == torch.float32
    assert compute_dtype(x.bfloat16()) == torch.bfloat16
    assert compute_dtype(x.to("meta")) == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert compute_dtype(x) == torch.bfloat16
        assert (x @ x).dtype == torch.bfloat16
        with without_autocast(x.device):
            assert (x @ x).dtype == torch.float32
    with without_autocast(torch.device("meta")):
        pass
