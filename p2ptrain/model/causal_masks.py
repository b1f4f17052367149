"""Whether the masks given to torch's own transformer are causal, found out before it is traced.

`nn.TransformerEncoder` and `nn.TransformerDecoder` compare a mask's values with a causal one where
nobody tells them, and call another kernel for it. A trace has no values. So the model runs once
with real ones before, and the trace gets the same answers, in the same order.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules import transformer

_ASKING = (nn.TransformerEncoder, nn.TransformerDecoder)
_original: Any = transformer._detect_is_causal_mask


class CausalMasks:
    """The answers of one run, in order, to be given again."""

    def __init__(self) -> None:
        self._answers: list[bool] = []
        self._given = 0

    def begin(self) -> None:
        """Start again with the first answer: forward() begins."""
        self._given = 0

    def learn(self, module: nn.Module, run: Callable[[], object]) -> None:
        """Run the model with real values, if it has layers that look at them.

        Args:
            module: its tensors are put back afterwards, as is the random generator.
            run: calls it.
        """
        self._answers = []
        if not any(isinstance(part, _ASKING) for part in module.modules()):
            return
        state = [(t, t.clone()) for t in (*module.parameters(), *module.buffers())]
        with torch.no_grad(), torch.random.fork_rng(devices=[]), _answering(self._ask_torch):
            try:
                run()
            except Exception:  # the trace fails in the same place, and is explained
                self._answers = []
            for tensor, before in state:
                tensor.copy_(before)

    @contextlib.contextmanager
    def known(self) -> Iterator[None]:
        """Give the answers that were found."""
        with _answering(self._repeat):
            yield

    def _ask_torch(self, *args: Any, **kwargs: Any) -> bool:
        self._answers.append(_original(*args, **kwargs))
        return self._answers[-1]

    def _repeat(self, *args: Any, **kwargs: Any) -> bool:
        if self._given >= len(self._answers):
            return bool(_original(*args, **kwargs))
        self._given += 1
        return self._answers[self._given - 1]


@contextlib.contextmanager
def _answering(answer: Callable[..., bool]) -> Iterator[None]:
    """In this thread `answer` says whether a mask is causal."""
    thread = threading.get_ident()
    before: Any = transformer._detect_is_causal_mask

    def ask(*args: Any, **kwargs: Any) -> bool:
        mine = threading.get_ident() == thread
        return bool((answer if mine else before)(*args, **kwargs))

    transformer._detect_is_causal_mask = ask
    try:
        yield
    finally:
        transformer._detect_is_causal_mask = before
