"""The checks of `p2ptrain doctor`, one file a subject: what each found, and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the doctor's.

    Attributes:
        subject: what was looked at, a word or two.
        found: what was seen.
        advice: what to do; empty where there is nothing to do.
    """

    verdict: Severity
    subject: str
    found: str
    advice: str = ""


def ok(subject: str, found: str) -> Check:
    """All is well."""
    return Check(Severity.OK, subject, found)


def warn(subject: str, found: str, advice: str) -> Check:
    """It works, but slowly or not everywhere."""
    return Check(Severity.WARN, subject, found, advice)


def bad(subject: str, found: str, advice: str) -> Check:
    """It does not work."""
    return Check(Severity.BAD, subject, found, advice)
