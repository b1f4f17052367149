"""Operators of ours that stand for ATen's while a model is traced; see `stand_ins`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = "p2ptrain"
_library: Any = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]


def stand_in(schema: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make an operator with ATen's name and arguments.

    What is decorated says what its results look like, and is replaced by the operator.
    """
    _library.define(schema)
    name = schema.partition("(")[0]
    function, _, overload = name.partition(".")

    def register(shape_of: Callable[..., Any]) -> Callable[..., Any]:
        torch.library.register_fake(f"{NAMESPACE}::{name}", shape_of, lib=_library)
        made: Any = getattr(getattr(torch.ops, NAMESPACE), function)
        operator: Callable[..., Any] = getattr(made, overload or "default")
        return operator

    return register
