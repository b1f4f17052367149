"""An app that embeds p2ptrain hears nothing of its logs unless it asks for them."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from p2ptrain.logs import ROOT_NAME, get_logger, log_to_stderr


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    logger = logging.getLogger(ROOT_NAME)
    before = (list(logger.handlers), logger.level, logger.propagate)
    logger.handlers[:], logger.propagate = [logging.NullHandler()], True
    logger.setLevel(logging.NOTSET)
    yield
    logger.handlers[:], level, logger.propagate = before
    logger.setLevel(level)


def test_a_library_is_silent(capfd: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    handlers, root.handlers[:] = list(root.handlers), []  # as in an app without logging
    try:
        get_logger("p2ptrain.test").warning("something_happened", peer="a")
    finally:
        root.handlers[:] = handlers
    assert capfd.readouterr() == ("", "")


def test_an_app_gets_it_through_logging(caplog: pytest.LogCaptureFixture) -> None:
    get_logger("p2ptrain.test").warning("something_happened", peer="a", count=2)
    assert caplog.messages == ["event='something_happened' peer='a' count=2"]


@pytest.mark.parametrize("debug", [False, True])
def test_the_command_line_writes_to_stderr(debug: bool, capsys: pytest.CaptureFixture[str]) -> None:
    log_to_stderr(debug=debug)
    log_to_stderr(debug=debug)  # twice in one process: still one line each
    log = get_logger("p2ptrain.test")
    log.debug("detail")
    log.warning("trouble")
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.split("event=")[1] for line in err.splitlines()] == (
        ["'detail'", "'trouble'"] if debug else ["'trouble'"]
    )
