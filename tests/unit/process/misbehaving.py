"""What is run in a box: functions that do what no model may."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from p2ptrain.process.zygote import Mark

TRIED = b"done"


def turn_round(content: bytes, mark: Mark) -> bytes:
    mark(1)
    return content[::-1]


def who(content: bytes, mark: Mark) -> bytes:
    return str(os.getpid()).encode()


def crash(content: bytes, mark: Mark) -> bytes:
    mark(7)
    return ctypes.string_at(0)


def abort(content: bytes, mark: Mark) -> bytes:
    mark(8)
    os.abort()


def fail(content: bytes, mark: Mark) -> bytes:
    raise RuntimeError("of no kind that is expected")


def eat(content: bytes, mark: Mark) -> bytes:
    mark(2)
    held = []
    while True:
        held.append(bytearray(1 << 24))


def map_memory(content: bytes, mark: Mark) -> bytes:
    return _tried(lambda: mmap.mmap(-1, 1 << 40, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def hang(content: bytes, mark: Mark) -> bytes:
    mark(3)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(1)


def answer_at_length(content: bytes, mark: Mark) -> bytes:
    return bytes(1 << 20)


def open_socket(content: bytes, mark: Mark) -> bytes:
    return _tried(socket.socket)


def write_file(content: bytes, mark: Mark) -> bytes:
    return _tried(lambda: Path(content.decode()).write_text("was here"))


def read_file(content: bytes, mark: Mark) -> bytes:
    return _tried(lambda: Path(content.decode()).read_text())


def delete_file(content: bytes, mark: Mark) -> bytes:
    return _tried(lambda: Path(content.decode()).unlink())


def start_program(content: bytes, mark: Mark) -> bytes:
    return _tried(lambda: os.execv("/bin/true", ["true"]))


def start_process(content: bytes, mark: Mark) -> bytes:
    return _tried(os.fork)


def signal_another(content: bytes, mark: Mark) -> bytes:
    return _tried(lambda: os.kill(int(content), signal.SIGKILL))


def use_threads(content: bytes, mark: Mark) -> bytes:
    threads = [threading.Thread(target=time.sleep, args=(0.001,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return TRIED


def _tried(attempt: Callable[[], object]) -> bytes:
    try:
        attempt()
    except (OSError, MemoryError) as error:
        return type(error).__name__.encode()
    return TRIED
