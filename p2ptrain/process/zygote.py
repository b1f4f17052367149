"""A process that has loaded everything and forks a child for each question; and that child.

    member ── fork ──► zygote: one thread, nothing computed yet, all of torch shared with the member
       │                 │ fork, a fresh one for each question
       └── question ──►  child: gives up files, network, ... (`confinement`), computes, answers

A fork of a process whose threads have computed would wait for ever for threads that it does not
have (OpenMP's). So the member forks its zygote after loading torch and before using it. Where that
is impossible, as in an app, and on systems other than Linux, the process is started as
`python -m p2ptrain.process.zygote`. Without fork it answers one question itself.

A question is this program's own; an answer is bytes that are not trusted.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import mmap
import os
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeAlias

from p2ptrain.process.confinement import confine, end_with_parent

Mark: TypeAlias = Callable[[int], None]
"""Notes where the computation is: the asker learns it when the child does not end well."""

Function: TypeAlias = Callable[[bytes, Mark], bytes]

HEAD = struct.Struct(">QQQ")
"""Of a question: memory in bytes, lengths of the function's name and of the content."""

ANSWER = struct.Struct(">Q")
"""Of an answer: its length."""

PLACE = struct.Struct("=q")

NOWHERE = -1

READY, ASK, KILL = b"ready", b"ask", b"kill"

OUT_OF_MEMORY_EXIT = 77

RAISED_EXIT = 78

_LOOK_SECONDS = 0.05
"""Between two looks at a child, on kernels without pidfd_open (before 5.3)."""


def fork(control: socket.socket, page: mmap.mmap) -> int:
    """Make a zygote of this process; returns its number.

    Args:
        control: its end of a pair, over which `serve` is asked.
        page: where children note where they are.
    """
    every = signal.valid_signals()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, every)
    pid = os.fork()
    if pid == 0:
        try:
            _leave_all_behind(control)
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            serve(control, page)
        finally:
            os._exit(1)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return pid


def serve(control: socket.socket, page: mmap.mmap | None) -> NoReturn:
    """Fork a child for each question, one at a time, until the asker is gone.

    It says READY. A question is ASK, with the child's end of a pair; the answer to it is the
    child's exit status.
    """
    control.send(READY)
    while True:
        word, given, _, _ = socket.recv_fds(control, len(KILL), 1)
        if not word:
            os._exit(0)
        if word != ASK or not given:
            continue  # of a child that has ended meanwhile
        pid = os.fork()
        if pid == 0:
            control.close()
            _be_child(given[0], given[0], page)
        for descriptor in given:
            os.close(descriptor)
        status = _watch(pid, control)
        control.send(str(os.waitstatus_to_exitcode(status)).encode())


def _watch(pid: int, control: socket.socket) -> int:
    """The child's status once it has ended, by itself or because that is wanted."""
    ended: list[int] = []
    with contextlib.suppress(OSError, AttributeError):
        ended.append(os.pidfd_open(pid))
    asked = [control.fileno()]
    while True:
        ready, _, _ = select.select([*asked, *ended], [], [], None if ended else _LOOK_SECONDS)
        if control.fileno() in ready:
            word = control.recv(len(KILL))
            os.kill(pid, signal.SIGKILL)
            if not word:
                os._exit(0)
            asked = []
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            for descriptor in ended:
                os.close(descriptor)
            return status


def _leave_all_behind(control: socket.socket) -> None:
    """Files, signals and streams of the member are not this process's."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the member; this ends with it
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    kept = control.fileno()
    os.closerange(3, kept)
    os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))


def _be_child(questions: int, answers: int, page: mmap.mmap | None) -> NoReturn:
    """Read a question, answer it, end. Nothing of torch is torn down: that may crash."""
    code = RAISED_EXIT
    try:
        end_with_parent()
        gc.freeze()
        memory_bytes, named, long = HEAD.unpack(_read(questions, HEAD.size))
        function = _function(_read(questions, named).decode())
        content = _read(questions, long)
        confine(memory_bytes)
        answer = function(content, _marker(page))
        _write(answers, ANSWER.pack(len(answer)) + answer)
        code = 0
    except MemoryError:
        code = OUT_OF_MEMORY_EXIT
    except BaseException as error:  # it is said by the exit code alone
        with contextlib.suppress(BaseException):
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
    os._exit(code)


def _marker(page: mmap.mmap | None) -> Mark:
    def mark(place: int) -> None:
        if page is not None:
            PLACE.pack_into(page, 0, place)

    return mark


def _function(name: str) -> Function:
    """Of "module:name"; this program's own."""
    module, _, attribute = name.partition(":")
    found: Function = getattr(importlib.import_module(module), attribute)
    return found


def _read(descriptor: int, length: int) -> bytes:
    parts, left = [], length
    while left:
        part = os.read(descriptor, min(left, 1 << 20))
        if not part:
            os._exit(0)  # no process waits
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _write(descriptor: int, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(descriptor, left) :]


def main(arguments: Sequence[str]) -> None:
    """As a program.

    Args:
        arguments: modules to import; where it is to fork, before them "--serve=CONTROL,PAGE", two
            descriptors. Else it answers one question from stdin, on stdout.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    served = [word for word in arguments if word.startswith("--serve=")]
    for module in arguments:
        if module not in served:
            importlib.import_module(module)
    gc.collect()
    gc.freeze()
    if served:
        control, page = map(int, served[0].removeprefix("--serve=").split(","))
        place = mmap.mmap(page, mmap.PAGESIZE)
        os.close(page)
        serve(socket.socket(fileno=control), place)
    answers = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever is printed is no answer
    os.write(answers, READY)
    _be_child(sys.stdin.fileno(), answers, None)


if __name__ == "__main__":
    main(sys.argv[1:])
