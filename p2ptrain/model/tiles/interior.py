"""A group's first convolution in two parts: what needs no halo while halos are on their way.

    begin      all of its outputs from the tile's own part, zeros where the halo will be:
               right inside, wrong in the strips that read the halo
    finish     the strips, once more, into the same tensor

Autograd is then given the very convolution of the whole input, whose result alone is known already:
what the backward computes, keeps, and puts off is what it would be otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from p2ptrain.errors import InternalError
from p2ptrain.model.tiles.kernels import Kernel, Place, convolution
from p2ptrain.model.tiles.pieces import cut, part
from p2ptrain.tiles.interior import Interior
from p2ptrain.tiles.span import Region, Span


@dataclass(frozen=True, slots=True)
class _Strip:
    """One of the strips.

    Attributes:
        reads: of what the tile has of the map that enters.
        makes: of the outputs.
    """

    reads: tuple[slice, slice]
    makes: tuple[slice, slice]
    call: Kernel


class InteriorFirst:
    """See the module; to be run again and again.

    Attributes:
        operation, map: of the convolution, and what it reads.
    """

    def __init__(
        self,
        interior: Interior,
        place: Place,
        state: Mapping[str, Tensor],
        owned: Region,
        required: Region,
    ) -> None:
        """Prepare it.

        Args:
            interior: what needs no halo.
            place: where the convolution makes all its outputs.
            state: the replica's tensors.
            owned, required: of the map that it reads: what the tile owns, and has with its halos.
        """
        self.operation, self.map = interior.operation, interior.map
        self._owned, self._own = owned, interior.own
        window = place.operation.rows, place.operation.columns
        self._early = convolution(
            place,
            state,
            (
                _lacking(window[0].reads(place.outputs.rows), interior.own.rows),
                _lacking(window[1].reads(place.outputs.columns), interior.own.columns),
            ),
        )
        self._strips = [
            _strip(replace(place, outputs=outputs), place.outputs, state, required)
            for outputs in interior.strips
        ]

    def begin(self, owned: Tensor) -> Tensor:
        """All outputs, of which those that read no halo are right; `owned`: the tile's own part."""
        return self._early([part(owned, self._owned, self._own)])

    def finish(self, made: Tensor, whole: Tensor) -> None:
        """Put the strips right; `made`: by `begin`, `whole`: what the tile requires of the map."""
        for strip in self._strips:
            cut(made, strip.makes).copy_(strip.call([cut(whole, strip.reads)]))


def _lacking(reads: Span, own: Span) -> tuple[int, int]:
    return own.first - reads.first, reads.end - own.end


def _strip(place: Place, whole: Region, state: Mapping[str, Tensor], required: Region) -> _Strip:
    """Where `place` makes it, of the `whole` outputs."""
    needed = Region(
        place.operation.rows.needed(place.outputs.rows, place.source.height),
        place.operation.columns.needed(place.outputs.columns, place.source.width),
    )
    call = convolution(place, state, place.padding)
    return _Strip(needed.within(required), place.outputs.within(whole), call)


# -- a convolution whose result is known ---------------------------------------------------------


def as_known(result: Tensor, call: Kernel, inputs: Sequence[Tensor]) -> Tensor:
    """`call(inputs)` as autograd records it, without computing the convolution in it."""
    if not torch.is_grad_enabled():
        return result
    known = _Known(result)
    with known:
        made = call(inputs)
    if not known.is_used:
        raise InternalError("what was to be a convolution is none")
    return made


class _Known(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Below autograd: a convolution gives what is known, all else is computed."""

    def __init__(self, result: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._result = result
        self.is_used = False

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function is torch.ops.aten.convolution.default:
            self.is_used = True
            return self._result
        return function(*args, **(kwargs or {}))
