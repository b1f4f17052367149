"""What devices of a job write to people is one line that leaves the terminal alone."""

from __future__ import annotations

import pytest

from p2ptrain.api.progress import PROGRESS, ProgressBoard
from p2ptrain.errors import ProtocolError
from p2ptrain.messages.job_requests import REASON_LIMIT_CHARACTERS, JobEnd
from p2ptrain.net.message import Message
from tests.support.memory_household import MemoryHousehold, memory_id


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        ("out of memory at layer 3", "out of memory at layer 3"),
        ("Zu wenig Speicher für Gerät „Küche“", "Zu wenig Speicher für Gerät „Küche“"),
        ("first\n  second\tthird", "first second third"),
        ("\x1b[2J\x1b[31mall is well", "?[2J?[31mall is well"),
        ("\x1f", ""),
        ("from \u202eright to left", "from ?right to left"),
    ],
)
def test_a_peers_text_is_one_harmless_line(sent: str, read: str) -> None:
    assert JobEnd.read({"job": "j", "reason": sent}).reason == read


def test_a_peers_text_has_a_limit() -> None:
    with pytest.raises(ProtocolError, match="reason: expected a text"):
        JobEnd.read({"job": "j", "reason": "\n" * (REASON_LIMIT_CHARACTERS + 1)})


async def test_a_line_of_progress_is_harmless_too() -> None:
    async with MemoryHousehold(["a", "b"]) as mesh:
        board = ProgressBoard(mesh["b"])
        fields = {"model": "\x1b[2Jnet", "epoch": 1, "devices": ["a", "\x07b"]}
        await mesh["a"].call(memory_id("b"), Message(PROGRESS, fields), timeout_seconds=5)
        line = {"holder": "a", "model": "?[2Jnet", "epoch": 1, "devices": ["a", "?b"]}
        assert board.line == line
