"""The child that `child_process` starts, as `python -m p2ptrain.process.child_process_main [rest]`.

It imports no planner before it rests: the import alone takes a third of a second of a processor.
"""

from __future__ import annotations

import os
import pickle
import signal
import struct
import sys
import threading
import time
from typing import BinaryIO

LENGTH = struct.Struct(">Q")

SLICE_SECONDS = 0.01
"""Of processor time, between two rests."""

RESTS = 9
"""A rest is so many times as long as what it rests from."""

NICENESS = 10


def main() -> None:
    """Answer one question."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who asked, and this ends with it
    if "rest" in sys.argv[1:]:
        _run_a_tenth_of_the_time()
    own_stdout = sys.stdout.buffer
    sys.stdout = sys.stderr  # whatever is printed is no answer
    _answer(sys.stdin.buffer, own_stdout)


def _answer(questions: BinaryIO, answers: BinaryIO) -> None:
    (length,) = LENGTH.unpack(questions.read(LENGTH.size))
    question = questions.read(length)
    threading.Thread(target=_end_with, args=(questions.fileno(),), daemon=True).start()
    function = pickle.loads(question)
    result, raised = None, None
    try:
        result = function()
    except Exception as error:  # raised again by who asked
        raised = error
    answers.write(pickle.dumps((result, raised)))
    answers.flush()


def _run_a_tenth_of_the_time() -> None:
    """Run a tenth of the time, and after others."""
    if not hasattr(signal, "setitimer"):  # Windows
        return
    woke = time.monotonic()

    def rest(*_signal: object) -> None:
        nonlocal woke
        time.sleep(RESTS * (time.monotonic() - woke))
        woke = time.monotonic()

    os.nice(NICENESS)
    signal.signal(signal.SIGPROF, rest)
    signal.setitimer(signal.ITIMER_PROF, SLICE_SECONDS, SLICE_SECONDS)


def _end_with(questions: int) -> None:
    """The asking process is gone. Reads past the buffer, whose lock the end needs."""
    while os.read(questions, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
