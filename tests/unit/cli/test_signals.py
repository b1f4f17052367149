"""Signals end a command the same way, however the command was started."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Iterator

import pytest

from p2ptrain.cli.signals import sigterm_interrupts, stop_event

SIGNALS = (signal.SIGINT, signal.SIGTERM)
needs_terminals = pytest.mark.skipif(sys.platform == "win32", reason="no SIGHUP")


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Whatever a test does to them."""
    numbers = SIGNALS if sys.platform == "win32" else (*SIGNALS, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("at_start", [signal.default_int_handler, signal.SIG_IGN])
def test_sigterm_interrupts_also_a_background_job_of_a_script(at_start: object) -> None:
    """A shell without job control starts what stands before `&` with SIGINT ignored."""
    signal.signal(signal.SIGINT, at_start)  # type: ignore[arg-type]
    ended: list[str] = []

    async def main() -> None:
        asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGTERM)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cleanly")

    with pytest.raises(KeyboardInterrupt), sigterm_interrupts():
        asyncio.run(main())
    assert ended == ["cleanly"]
    assert signal.getsignal(signal.SIGINT) is at_start


def test_the_handlers_stand_again_afterwards() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with sigterm_interrupts():
        assert signal.getsignal(signal.SIGTERM) is not before[1]
    assert [signal.getsignal(number) for number in SIGNALS] == before


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_asks_to_stop_the_second_interrupts(number: signal.Signals) -> None:
    async def main() -> None:
        with stop_event() as stop:
            before = signal.getsignal(signal.SIGINT)
            signal.raise_signal(number)
            await stop.wait()
            assert signal.getsignal(signal.SIGINT) is not before

    asyncio.run(main())


@needs_terminals
def test_a_closed_terminal_asks_to_stop_however_often_it_says_so() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

    async def main() -> None:
        with stop_event() as stop:
            signal.raise_signal(signal.SIGHUP)
            await stop.wait()
            signal.raise_signal(signal.SIGHUP)

    asyncio.run(main())
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


@needs_terminals
def test_a_closed_terminal_is_ignored_where_it_was_to_be() -> None:
    """As nohup does."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

    async def main() -> None:
        with stop_event() as stop:
            signal.raise_signal(signal.SIGHUP)
            await asyncio.to_thread(lambda: None)  # several turns of the loop
            assert not stop.is_set()

    asyncio.run(main())
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
