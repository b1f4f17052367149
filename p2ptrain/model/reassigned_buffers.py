"""Buffers that forward() assigns to (`self.ema = ...`), which a trace would leave as they were."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from p2ptrain.errors import CaptureError
from p2ptrain.model.autograd_graph import kept_memory
from p2ptrain.model.derivatives import recorder
from p2ptrain.model.held import Held, joined
from p2ptrain.model.storage import storage_of


class KeptBuffersError(Exception):
    """forward() replaces buffers of which the backward needs what was there before."""

    def __init__(self, paths: frozenset[str]) -> None:
        super().__init__(f"the backward needs {sorted(paths)} as they were")
        self.paths = paths


class ReassignedBuffers:
    """Buffers as they were before forward(), to find those that it reassigned."""

    def __init__(self, held: Held, copied: Collection[str]) -> None:
        """`copied`: paths of those of which forward() is given a copy."""
        self._copied = copied
        self._before = [
            (path, owner, name, tensor)
            for path, owner in held.modules()
            for name, tensor in owner._buffers.items()
            if tensor is not None
        ]
        for path, owner, name, tensor in self._before:
            if joined(path, name) in copied:
                owner._buffers[name] = tensor.clone()

    def check(self, loss: Tensor) -> None:
        """Look whether the backward of `loss` needs what was there before, while it is traced.

        Raises:
            KeptBuffersError: the buffers of which it does.
            CaptureError: it does, and a copy was not enough.
        """
        if recorder() is None:
            return
        assigned = [b for b in self._before if b[1]._buffers.get(b[2]) is not b[3]]
        kept = kept_memory(loss) if assigned else frozenset[int]()
        paths = frozenset(joined(p, name) for p, _, name, b in assigned if storage_of(b) in kept)
        for path in sorted(paths.intersection(self._copied)):
            raise CaptureError(
                f"forward() replaces the buffer {path!r} after it has computed with it, and the "
                "backward needs what was there before. Compute with a copy: buffer.clone()"
            )
        if paths:
            raise KeptBuffersError(paths)

    def write_back(self) -> list[tuple[str, Tensor]]:
        """Write what was assigned into the buffers themselves, as part of the graph.

        Returns:
            Paths of those that got another shape or type, and what they keep.
        """
        regrown = []
        for path, owner, name, before in self._before:
            after = owner._buffers.get(name)
            if after is before:
                continue
            if after is None or after.shape != before.shape or after.dtype != before.dtype:
                regrown.append((joined(path, name), before))
            else:
                with torch.no_grad():
                    before.copy_(after)
            owner._buffers[name] = before
        return regrown
