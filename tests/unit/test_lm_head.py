import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from automimo.errors import ConfigError, DataError
from automimo.mimo_v2_flash.lm_head import LMHead, cross_entropy_sum

TOKENS, HIDDEN, VOCABULARY = 37, 24, 301


def make_case(dtype=torch.float32, masked=0.3):
    torch.manual_seed(0)
    head = LMHead(HIDDEN, VOCABULARY, dtype=dtype)
    hidden = torch.randn(TOKENS, HIDDEN).to(dtype).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (TOKENS,))
    targets[torch.rand(TOKENS) < masked] = -100
    targets[0] = VOCABULARY - 1
    targets[1] = 0
    return head, hidden, targets


def reference(hidden, weight, targets, scale=1.0):
    hidden, weight = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    loss = F.cross_entropy(hidden @ weight.T, targets, reduction="sum", ignore_index=-100)
    return (loss.detach(), *torch.autograd.grad(loss * scale, (hidden, weight)))


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.parametrize("chunk", [1, 2, 7, 26, 37, 1024])
@pytest.mark.parametrize("masked", [0.0, 0.3, 0.95])
def test_loss_and_gradients_equal_full_logits(chunk, masked):
    head, hidden, targets = make_case(masked=masked)
    loss = head(hidden, targets, chunk=chunk)
    (loss * 0.37).backward()
    want = reference(hidden, head.weight, targets, 0.37)
    assert loss.dtype == torch.float32
    assert loss.shape == ()
    assert loss.item() == pytest.approx(want[0].item(), rel=1e-6)
    assert relative(hidden.grad, want[1]) < 1e-6
    assert relative(head.weight.grad, want[2]) < 1e-6
    assert torch.equal(hidden.grad[targets == -100], torch.zeros_like(hidden)[targets == -100])


def test_confident_logits_stay_exact():
    head, hidden, targets = make_case()
    with torch.no_grad():
        hidden.mul_(60)  # logits of some hundred: softmax saturates, losses from 0 to hundreds
    loss = head(hidden, targets, chunk=5)
    loss.backward()
    want = reference(hidden, head.weight, targets)
    assert loss.item() == pytest.approx(want[0].item(), rel=1e-6)
    assert relative(hidden.grad, want[1]) < 1e-5  # exp of a logit of size 100 carries its rounding, 100 * 6e-8
    assert relative(head.weight.grad, want[2]) < 1e-5


def test_without_targets_it_is_a_linear_map():
    head, hidden, _ = make_case()
    assert torch.equal(head(hidden), hidden @ head.weight.T)
    assert head.bias is None
    assert list(head.state_dict()) == ["weight"]


def test_leading_dimensions():
    head, hidden, targets = make_case()
    flat = head(hidden, targets)
    assert torch.equal(head(hidden.unsqueeze(0), targets.unsqueeze(0)), flat)


@pytest.mark.parametrize("frozen", ["hidden", "weight", "both"])
def test_frozen_parts(frozen):
    head, hidden, targets = make_case()
    want = reference(hidden, head.weight, targets)
    hidden.requires_grad_(frozen == "weight")
    head.weight.requires_grad_(frozen == "hidden")
    with LargestTensor() as seen:
        loss = head(hidden, targets)
    assert loss.item() == pytest.approx(want[0].item(), rel=1e-6)
    assert seen.matmuls == {"hidden": 2, "weight": 2, "both": 1}[frozen]  # the logits, and the gradient that is wanted
    assert loss.requires_grad is (frozen != "both")
    if frozen == "both":
        return
    loss.backward()
    if frozen == "weight":
        assert head.weight.grad is None
        assert relative(hidden.grad, want[1]) < 1e-6
    else:
        assert hidden.grad is None
        assert relative(head.weight.grad, want[2]) < 1e-6


def test_no_grad_mode_does_no_gradient_work():
    head, hidden, targets = make_case()
    with torch.no_grad(), LargestTensor() as seen:
        loss = head(hidden, targets)
    assert not loss.requires_grad
    assert seen.matmuls == 1
    with torch.inference_mode():
        assert torch.equal(head(hidden, targets), loss)


def test_no_target_at_all():
    head, hidden, targets = make_case()
    loss = head(hidden, torch.full_like(targets, -100))
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))
    assert torch.equal(head.weight.grad, torch.zeros_like(head.weight))
    empty = head(hidden[:0], targets[:0])
    assert empty.item() == 0.0


def test_second_backward():
    head, hidden, targets = make_case()
    loss = head(hidden, targets)
    loss.backward(retain_graph=True)
    first = hidden.grad.clone(), head.weight.grad.clone()
    loss.backward()
    torch.testing.assert_close(hidden.grad, 2 * first[0])
    torch.testing.assert_close(head.weight.grad, 2 * first[1])
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("bad", [VOCABULARY, 10**9, -1, -101])
def test_target_outside_the_vocabulary(bad):
    head, hidden, targets = make_case()
    targets[9] = bad
    with pytest.raises(DataError, match=rf"target {bad} at token 9 .*vocabulary of {VOCABULARY}"):
        head(hidden, targets)


def test_other_errors():
    head, hidden, targets = make_case()
    with pytest.raises(ConfigError, match="at least 1 token, got 0"):
        head(hidden, targets, chunk=0)
    with pytest.raises(DataError, match=r"\(36,\).*\(37, 24\)"):
        head(hidden, targets[1:])


def test_bf16():
    head, hidden, targets = make_case(torch.bfloat16)
    loss = head(hidden, targets, chunk=10)
    loss.backward()
    logits = (hidden @ head.weight.T).float()
    exact = F.cross_entropy(logits, targets, reduction="sum", ignore_index=-100)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=1e-6)  # softmax in fp32
    assert hidden.grad.dtype == head.weight.grad.dtype == torch.bfloat16
    want = reference(hidden, head.weight, targets)
    # bf16 logits, bf16 probabilities, bf16 result: three roundings, in the mean of 2^-9 each
    assert relative(hidden.grad, want[1]) < 3 * 2**-9
    assert relative(head.weight.grad, want[2]) < 3 * 2**-9


def test_bf16_weight_gradient_adds_up_in_fp32():
    # 1,024 equal terms one at a time: a bf16 sum stops growing at 256 of them.
    head, hidden, targets = make_case(torch.bfloat16, masked=0.0)
    one = head(hidden[:1], targets[:1])
    one.backward()
    single, head.weight.grad = head.weight.grad.float(), None
    head(hidden[:1].expand(1024, -1), targets[:1].expand(1024), chunk=1).backward()
    assert relative(head.weight.grad, 1024 * single) < 2**-8


def test_autocast():
    head, hidden, targets = make_case()
    with torch.autocast("cpu", torch.bfloat16):
        loss = head(hidden, targets, chunk=8)
    loss.backward()
    narrow = cross_entropy_sum(hidden.bfloat16(), head.weight.bfloat16(), targets, 8)
    assert torch.equal(loss, narrow)
    assert hidden.grad.dtype == head.weight.grad.dtype == torch.float32
    want = reference(hidden, head.weight, targets)
    assert relative(hidden.grad, want[1]) < 4 * 2**-9  # the casts of input and weight come on top
    assert relative(head.weight.grad, want[2]) < 4 * 2**-9


class LargestTensor(TorchDispatchMode):
    """Size in elements of the largest tensor any operation returns, and the number of matmuls."""

    def __init__(self):
        super().__init__()
        self.elements = 0
        self.matmuls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor) and not leaf.is_meta]
        self.elements = max([self.elements, *sizes])
        self.matmuls += func._overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_full_logits_never_exist(dtype):
    torch.manual_seed(0)
    tokens, hidden_size, vocabulary, chunk = 256, 8, 1000, 16
    head = LMHead(hidden_size, vocabulary, dtype=dtype)
    hidden = torch.randn(tokens, hidden_size).to(dtype).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,))
    with LargestTensor() as seen:
        head(hidden, targets, chunk=chunk).backward()
    assert seen.elements <= chunk * vocabulary
    with LargestTensor() as full:
        F.cross_entropy(head(hidden), targets)
    assert full.elements == tokens * vocabulary  # the probe does see logits


def test_masked_tokens_are_not_projected():
    head, hidden, targets = make_case()
    targets[5:] = -100
    with LargestTensor() as seen:
        head(hidden, targets, chunk=1024).backward()
    assert seen.elements <= max(5, HIDDEN) * VOCABULARY  # 5 rows of logits; the weight gradient
    assert seen.elements < TOKENS * VOCABULARY


def test_same_bits_every_time_with_two_threads():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.manual_seed(0)
        head = LMHead(64, 2000)
        hidden = torch.randn(500, 64, requires_grad=True)
        targets = torch.randint(0, 2000, (500,))
        runs = [torch.autograd.grad(head(hidden, targets, chunk=128), (hidden, head.weight)) for _ in range(4)]
        for run in runs[1:]:
            assert torch.equal(run[0], runs[0][0])
            assert torch.equal(run[1], runs[0][1])
    finally:
        torch.set_num_threads(threads)
