"""What a command says, where that is not easy to say."""

from __future__ import annotations

import errno
import io

import pytest

from p2ptrain.cli.output import Output, aligned, words
from p2ptrain.events import Member, Step


class _Full(io.StringIO):
    """A file on a disk that is full at times."""

    full = True

    def flush(self) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("json", [False, True])
def test_events_go_on_without_a_disk_and_one_warning_says_so(
    json: bool, caplog: pytest.LogCaptureFixture
) -> None:
    stream = _Full()
    output = Output(stream, json=json)
    for name in ("pi", "tv"):
        output.show(Member(name=name, state="alive"))
    assert caplog.text.count("No space left") == 1
    stream.full = False
    output.show(Member(name="laptop", state="alive"))
    assert "laptop" in stream.getvalue()
    stream.full = True
    output.show(Member(name="pi", state="dead"))
    assert caplog.text.count("No space left") == 2


def test_the_end_of_the_display_is_no_failure_either(caplog: pytest.LogCaptureFixture) -> None:
    stream = _Full()
    stream.full = False
    output = Output(stream, json=False)
    for step in (1, 2):  # the second one is held back
        output.show(Step(step=step, loss=0.5, samples_per_s=1.0, seconds=1.0))
    stream.full = True
    output.close()
    assert caplog.text.count("No space left") == 1


def test_an_answer_that_cannot_be_written_is_a_failure() -> None:
    with pytest.raises(OSError, match="No space left"):
        Output(_Full(), json=True).result({"name": "pi"}, "pi")


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    assert aligned([("name", "state", ""), ("old-notebook", "left", "x")]) == [
        "name          state",
        "old-notebook  left   x",
    ]


def test_bytes_truths_and_numbers_in_words() -> None:
    values = {"role": "member", "sent_bytes": 16_271_949, "connected": False, "paired": True}
    assert words(values) == "role member, sent 16.3 MB, not connected, paired"
    assert words({"samples_per_s": 1234.56, "step": 7}) == "samples per s 1,234.6, step 7"


def test_what_is_not_set_or_no_single_value_is_left_out() -> None:
    assert words({"introduced_by": None, "addresses": ["a"], "id": "x"}) == "id x"
