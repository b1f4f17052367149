"""Runs of positions along one axis, and rectangles made of two of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """Positions first, first + 1, ..., end - 1 of one axis; empty where end == first."""

    first: int
    end: int

    @property
    def size(self) -> int:
        """How many positions."""
        return self.end - self.first

    def intersection(self, other: Span) -> Span:
        """The positions in both; empty, and anywhere, where there are none."""
        first, end = max(self.first, other.first), min(self.end, other.end)
        return Span(first, max(first, end))

    def hull(self, other: Span) -> Span:
        """The shortest span with all positions of both."""
        if self.size == 0:
            return other
        if other.size == 0:
            return self
        return Span(min(self.first, other.first), max(self.end, other.end))

    def within(self, other: Span) -> slice:
        """Where this span lies in a tensor that holds `other`."""
        return slice(self.first - other.first, self.end - other.first)


@dataclass(frozen=True, slots=True)
class Region:
    """A rectangle of a feature map."""

    rows: Span
    columns: Span

    @property
    def area(self) -> int:
        """How many positions."""
        return self.rows.size * self.columns.size

    def intersection(self, other: Region) -> Region:
        """The positions in both."""
        return Region(self.rows.intersection(other.rows), self.columns.intersection(other.columns))

    def hull(self, other: Region) -> Region:
        """The smallest rectangle around both."""
        if self.area == 0:
            return other
        if other.area == 0:
            return self
        return Region(self.rows.hull(other.rows), self.columns.hull(other.columns))

    def within(self, other: Region) -> tuple[slice, slice]:
        """Where this region lies in a tensor that holds `other`."""
        return self.rows.within(other.rows), self.columns.within(other.columns)
