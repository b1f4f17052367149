"""Two devices of one name: the one that started later takes NAME-2. Pure."""

from __future__ import annotations

from collections.abc import Collection

from p2ptrain.mesh.hello import Hello, is_younger


def must_rename(own: Hello, own_id: str, theirs: Hello, their_id: str) -> bool:
    """Whether this device is the one that gives way; the other side comes to the opposite.

    Args:
        own, theirs: the two hellos of one link, with the names that count now.
    """
    return own.name == theirs.name and is_younger(own, own_id, theirs, their_id)


def free_name(asked: str, taken: Collection[str]) -> str:
    """`asked`, or with the smallest free suffix from -2 on."""
    if asked not in taken:
        return asked
    number = 2
    while f"{asked}-{number}" in taken:
        number += 1
    return f"{asked}-{number}"
