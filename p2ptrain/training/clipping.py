"""Clipping by the global norm, the holder's half: norms in, one coefficient out.

torch.nn.utils.clip_grad_norm_ takes the norm of the vector of the tensors' norms, in the order of
`model.parameters()`. So each stage sends its tensors' norms, not partial sums, and the result is
bit-identical to one device's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from p2ptrain.errors import ProtocolError
from p2ptrain.model import clip


class NormGathering:
    """Norms of one round after the other.

    Args:
        order: every trainable parameter's canonical name, in the model's order.
        names: stage -> the names whose norms it sends, in its order.
        dtypes: name -> dtype of its gradient.
        max_norm: the job's `clip_grad_norm`.
    """

    def __init__(
        self,
        order: Sequence[str],
        names: Sequence[Sequence[str]],
        dtypes: dict[str, torch.dtype],
        max_norm: float,
    ) -> None:
        self._order = order
        self._names = names
        self._dtypes = dtypes
        self._max_norm = max_norm
        self._norms: dict[str, Tensor] = {}
        self._reported = 0

    def add(self, stage: int, first: int, norms: Sequence[Any]) -> Tensor | None:
        """Some of a stage's norms (None: no gradient); the coefficient once all are here.

        Raises:
            ProtocolError: more norms than that stage has parameters, or not numbers.
        """
        names = self._names[stage] if 0 <= stage < len(self._names) else ()
        if first < 0 or first + len(norms) > len(names):
            raise ProtocolError(f"stage {stage} sent norms of parameters it does not have")
        for name, norm in zip(names[first : first + len(norms)], norms, strict=False):
            if norm is not None:
                if not isinstance(norm, float):
                    raise ProtocolError("a norm is a number")
                self._norms[name] = torch.tensor(norm, dtype=self._dtypes[name])
        self._reported += len(norms)
        if self._reported < sum(len(names) for names in self._names):
            return None
        return self._coefficient()

    def _coefficient(self) -> Tensor:
        norms = [self._norms[name] for name in self._order if name in self._norms]
        self._norms, self._reported = {}, 0
        if not norms:
            return torch.tensor(1.0)
        return clip.clip_coefficient(norms, self._max_norm)
