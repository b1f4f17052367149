"""Manners that cannot be meant are refused in one clear line."""

from __future__ import annotations

from typing import Any

import pytest

from p2ptrain.errors import OptionError
from p2ptrain.manners.settings import Manners, QuietHours


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"when_idle": "yes"}, "when_idle must be True or False"),
        ({"max_cpu": 0}, "max_cpu must be above 0"),
        ({"max_cpu": 50}, "max_cpu must be above 0"),
        ({"max_cpu": float("nan")}, "max_cpu must be above 0"),
        ({"max_cpu": True}, "max_cpu must be above 0"),
        ({"on_battery": "stop"}, "on_battery must be one of pause, slow, ignore"),
        ({"max_temperature": 900}, "from 30 to 120 degrees"),
        ({"max_temperature": "hot"}, "from 30 to 120 degrees"),
        ({"quiet_hours": "25-7"}, "write two times of day such as 22-7"),
        ({"quiet_hours": "22"}, "write two times of day such as 22-7"),
        ({"quiet_hours": "22:60-7"}, "write two times of day such as 22-7"),
        ({"quiet_hours": "7-7:00"}, "begin and end at once"),
        ({"quiet_hours": 22}, "must be a text"),
    ],
)
def test_what_cannot_be_meant_is_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        Manners(**wrong)


@pytest.mark.parametrize(
    ("text", "begin", "end", "until"),
    [
        ("22-7", 1320, 420, "7:00"),
        ("22:30 - 6:45", 1350, 405, "6:45"),
        ("0-24:00", None, None, ""),
        ("18-24", 1080, 0, "0:00"),
    ],
)
def test_quiet_hours_are_read(text: str, begin: int | None, end: int | None, until: str) -> None:
    if begin is None:
        with pytest.raises(OptionError):  # a whole day: then one does not join
            QuietHours.parse(text)
        return
    hours = Manners(quiet_hours=text).quiet
    assert hours is not None
    assert (hours.begin_minute, hours.end_minute, hours.end_text) == (begin, end, until)
