"""In place of `boxed.measure`: a model that ends whatever process runs it."""

from __future__ import annotations

import ctypes

from p2ptrain.process.zygote import Mark


def measure(content: bytes, mark: Mark) -> bytes:
    mark(1)
    return ctypes.string_at(0)
