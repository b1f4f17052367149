"""What the kernel says of a connection."""

from __future__ import annotations

import socket
import struct
import sys
from typing import cast

import pytest

from p2ptrain.net.link.stream import StreamArrival
from p2ptrain.net.transport import sockets


class FakeSocket:
    """Answers TCP_INFO with what it was given."""

    def __init__(self, info: bytes | OSError) -> None:
        self._info = info

    def getsockopt(self, level: int, option: int, most_bytes: int) -> bytes:
        if isinstance(self._info, OSError):
            raise self._info
        return self._info[:most_bytes]


def arrival(info: bytes | OSError) -> StreamArrival | None:
    return sockets.arrival(cast(socket.socket, FakeSocket(info)))


linux_only = pytest.mark.skipif(sys.platform != "linux", reason="no other system says it so")


@linux_only
def test_the_kernel_counts_unread_bytes() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as sender,
        server.accept()[0] as receiver,
    ):
        sender.sendall(b"x" * 5000)
        while len(receiver.recv(5000, socket.MSG_PEEK)) < 5000:
            pass
        assert sockets.arrival(receiver) == StreamArrival(5000, 0)


@linux_only
def test_packets_ahead_of_a_lost_one_are_counted() -> None:
    info = bytearray(240)  # a newer kernel's has more at its end
    struct.pack_into("=Q", info, 128, 2**40)
    struct.pack_into("=I", info, 224, 7)
    assert arrival(bytes(info)) == StreamArrival(2**40, 7)


@linux_only
@pytest.mark.parametrize("info", [bytes(192), OSError(92, "Protocol not available")])
def test_a_kernel_that_does_not_say_it_is_no_error(info: bytes | OSError) -> None:
    assert arrival(info) is None


def test_a_system_without_it_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert arrival(bytes(240)) is None
