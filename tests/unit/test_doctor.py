"""`automimo doctor`: what it reports, and that it notices an installation that computes wrongly."""

import io

import pytest
import torch
from packaging.requirements import Requirement
from rich.console import Console

from automimo import doctor
from automimo.doctor import check_version, examine, run_doctor


def run(width: int) -> tuple[int, str]:
    out = io.StringIO()
    code = run_doctor(Console(file=out, width=width, highlight=False))
    return code, out.getvalue()


def test_this_installation_is_healthy() -> None:
    findings = list(examine())
    assert [finding for finding in findings if finding.state == "failed"] == []
    named = {finding.name: finding for finding in findings}
    assert named["torch"].value == torch.__version__
    assert "eager, sdpa" in named["attention"].value
    assert named["transformers reader"].state == "ok"
    assert [f.name for f in findings if f.group == "self check"] == ["attention sdpa = eager", "experts grouped = loop"]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_table_is_readable_at_any_width_without_colour(width: int) -> None:
    code, text = run(width)
    assert code == 0
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    assert "\x1b" not in text
    assert "transformers" in text
    assert "Everything that AutoMiMo needs works here." in " ".join(text.split())


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("torch>=2.0", "ok"),
        (f"torch=={torch.__version__.split('+')[0]}", "ok"),
        ("torch>=99", "failed"),
        ("surely-not-installed>=1", "failed"),
    ],
)
def test_versions_are_held_against_what_the_project_asks_for(text: str, state: str) -> None:
    finding = check_version(Requirement(text))
    assert finding.state == state
    if state == "failed":
        assert ">=" in finding.value


@pytest.mark.parametrize("value", [3e-3, float("nan"), float("inf")])
def test_a_wrong_result_fails_the_check(monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    monkeypatch.setattr(doctor, "attention_difference", lambda: value)
    code, text = run(100)
    assert code == 1
    assert "FAILED" in text
    assert "failed: attention sdpa = eager: largest relative difference" in text
    assert "allowed 1e-05" in text


def test_a_check_that_raises_is_a_failure_and_not_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> float:
        raise RuntimeError("illegal instruction [avx]")

    monkeypatch.setattr(doctor, "expert_difference", broken)
    code, text = run(100)
    assert code == 1
    assert "RuntimeError: illegal instruction [avx]" in text


def test_the_self_checks_see_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that is off by one part in a thousand is far outside what the check allows."""
    right_attend, right_experts = doctor.attend, doctor.expert_mlp

    def wrong_attend(*args: torch.Tensor, backend: str, **options: object) -> torch.Tensor:
        out = right_attend(*args, backend=backend, **options)
        return out * 1.001 if backend == "sdpa" else out

    def wrong_experts(*args: torch.Tensor) -> torch.Tensor:
        out = right_experts(*args)
        return out * 1.001 if args[-1] == "torch_mm" else out

    assert doctor.attention_difference() < doctor.SELF_CHECK_TOLERANCE
    assert doctor.expert_difference() < doctor.SELF_CHECK_TOLERANCE
    monkeypatch.setattr(doctor, "attend", wrong_attend)
    monkeypatch.setattr(doctor, "expert_mlp", wrong_experts)
    assert doctor.attention_difference() == pytest.approx(1e-3, rel=0.05)
    assert doctor.expert_difference() == pytest.approx(1e-3, rel=0.05)


def test_an_unsupported_dtype_is_reported_as_missing() -> None:
    assert doctor.grouped_mm_problem(torch.float32) is None
    problem = doctor.grouped_mm_problem(torch.float64)
    assert problem is not None
    assert "experts run in a loop" in problem
