"""The text of a .cfg file: sections in square brackets with lines `key=value`.

The format is that of Darknet (Redmon 2013-2016, pjreddie.com/darknet): comments begin with # or ;,
sections repeat and their order is that of the layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


class CfgError(ValueError):
    """A file that cannot be read; names the line."""


@dataclass(frozen=True)
class Section:
    """One section.

    Attributes:
        name: without brackets, lower case.
        line: where it begins, from 1.
        values: as they stand in the file.
    """

    name: str
    line: int
    values: Mapping[str, str] = field(default_factory=dict)

    def whole(self, key: str, default: int | None = None, *, least: int = 0) -> int:
        """A whole number of at least `least`; CfgError where it is missing or none."""
        text = self.values.get(key)
        if text is None:
            if default is None:
                raise self.error(f"needs {key}=")
            return default
        try:
            number = int(text)
        except ValueError:
            raise self.error(f"{key}={text} is not a whole number") from None
        if number < least:
            raise self.error(f"{key}={text} must be at least {least}")
        return number

    def wholes(self, key: str) -> list[int]:
        """Whole numbers with commas between them."""
        text = self.values.get(key, "")
        try:
            return [int(part) for part in text.split(",")]
        except ValueError:
            raise self.error(f"{key}={text} is not a list of whole numbers") from None

    def error(self, message: str) -> CfgError:
        """What to raise about this section."""
        return CfgError(f"line {self.line}: [{self.name}] {message}")


def read_cfg(path: str | Path) -> list[Section]:
    """The sections of a file; see `parse`. Comments may be in any encoding."""
    return parse(Path(path).read_text(encoding="utf-8-sig", errors="replace"))


def parse(text: str) -> list[Section]:
    """The sections of a file's text, the first of them [net].

    Raises:
        CfgError: a line is neither section nor key=value, a key stands twice or before any section,
            or the first section is not [net] (or [network]).
    """
    sections: list[tuple[str, int, dict[str, str]]] = []
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.split("#")[0].split(";")[0].strip()
        if not line:
            continue
        if line.startswith("["):
            if not line.endswith("]"):
                raise CfgError(f"line {number}: no closing bracket in {line[:40]!r}")
            sections.append((line[1:-1].strip().lower(), number, {}))
            continue
        key, equals, value = line.partition("=")
        key, value = key.strip(), value.strip()
        if not equals or not key or not value:
            raise CfgError(f"line {number}: expected key=value, found {line[:40]!r}")
        if not sections:
            raise CfgError(f"line {number}: {key}= stands before any section")
        if key in sections[-1][2]:
            raise CfgError(f"line {number}: {key}= stands twice in [{sections[-1][0]}]")
        sections[-1][2][key] = value
    if not sections or sections[0][0] not in ("net", "network"):
        raise CfgError("line 1: the first section must be [net]")
    return [Section(name, line, values) for name, line, values in sections]
