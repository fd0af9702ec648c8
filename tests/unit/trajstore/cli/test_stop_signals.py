from __future__ import annotations

import signal

import pytest

from trajstore.cli.stop_signals import StopRequest

SIGNALS = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])


@SIGNALS
def test_the_first_signal_asks_to_stop_and_the_second_ends_the_process(
    number: int, capfd: pytest.CaptureFixture[str]
) -> None:
    before = {other: signal.getsignal(other) for other in (signal.SIGINT, signal.SIGTERM)}
    with StopRequest() as stop:
        stop.begin()
        assert not stop()
        assert stop.number is None
        signal.raise_signal(number)
        assert stop()
        assert stop.number == number
        assert stop.exit_code == 128 + number
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert {other: signal.getsignal(other) for other in before} == before
    assert "a second signal stops at once" in capfd.readouterr().err


@SIGNALS
def test_before_anything_is_done_a_signal_is_the_end(number: int) -> None:
    with StopRequest() as stop:
        assert not stop()
        with pytest.raises(SystemExit) as error:
            signal.raise_signal(number)
    assert error.value.code == 128 + number
