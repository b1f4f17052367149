"""Functions of torch's that are others for a while, to the thread that captures a model."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def replaced_in_this_thread(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Call `function` instead of `owner.name`; other threads train meanwhile, with the latter."""
    thread = threading.get_ident()
    original: Callable[..., Any] = getattr(owner, name)

    def either(*args: Any, **kwargs: Any) -> Any:
        called = function if threading.get_ident() == thread else original
        return called(*args, **kwargs)

    setattr(owner, name, either)
    try:
        yield
    finally:
        setattr(owner, name, original)
