"""Which releases of torch p2ptrain works with; torch is not loaded for this."""

from __future__ import annotations

import importlib.metadata

from p2ptrain.errors import UserError

OLDEST = (2, 9)

BROKEN = ((2, 10), (2, 11))
"""A backward after a fake tensor in another thread ends the process there (SIGSEGV): every `train`
does that. pyproject.toml excludes them too, as far as pip is asked."""


def why_not(version: str) -> tuple[str, str] | None:
    """What is wrong with that release, and what to do; None where nothing is known to be."""
    release = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    oldest = ".".join(map(str, OLDEST))
    if release < OLDEST:
        return f"{version} is too old", f"run  pip install 'torch>={oldest}'"
    if release in BROKEN:
        wanted = ",".join([f">={oldest}", *(f"!={a}.{b}.*" for a, b in BROKEN)])
        return f"{version} crashes while it trains", f"run  pip install 'torch{wanted}'"
    return None


def check() -> None:
    """Refuse a torch that cannot work, before it is used.

    Raises:
        UserError: with what to do.
    """
    version = installed()
    wrong = why_not(version) if version is not None else None
    if wrong is not None:
        raise UserError(f"torch {wrong[0]}: {wrong[1]}")


def installed() -> str | None:
    """The version of the torch that would be loaded; None where there is none."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
