"""Requests to stop: whose they are, and which signals end a process at once."""

import signal

import pytest

from automimo.training.stop import StopRequest, stop_on_signals

TERM, INT = signal.SIGTERM, signal.SIGINT


def test_one_process_stops_by_its_own_signal() -> None:
    with stop_on_signals() as request:
        assert (bool(request), request.local, request.exit_code) == (False, 0, 0)
        signal.raise_signal(TERM)
        assert (bool(request), request.local, request.exit_code) == (True, TERM, 143)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(INT)  # the second one acts as usual


def test_one_of_several_stops_when_all_do() -> None:
    with stop_on_signals(4) as request:
        signal.raise_signal(TERM)
        assert (bool(request), request.local, request.exit_code) == (False, TERM, 0)
        request.agree(0)
        assert not request
        request.agree(request.local)
        assert (bool(request), request.exit_code) == (True, 143)


def test_a_rank_without_a_signal_stops_by_that_of_another() -> None:
    request = StopRequest(shared=True)
    request.agree(INT)
    assert (bool(request), request.local, request.exit_code) == (True, 0, 130)


def test_of_several_only_a_second_ctrl_c_ends_at_once() -> None:
    """SIGTERM may come from the scheduler and from the launcher, while the rank saves."""
    with stop_on_signals(4) as request:
        for number in (TERM, TERM, INT, TERM, TERM):
            signal.raise_signal(number)
        assert request.local == TERM, "the largest, so that the ranks agree on one whatever the order"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(INT)
        signal.raise_signal(TERM)


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_handlers_are_put_back(world_size: int) -> None:
    before = [signal.getsignal(number) for number in (TERM, INT)]
    with stop_on_signals(world_size):
        assert [signal.getsignal(number) for number in (TERM, INT)] != before
        signal.raise_signal(TERM)
    assert [signal.getsignal(number) for number in (TERM, INT)] == before
