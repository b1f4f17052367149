"""One micro-batch on one tile, forward and back, as a machine that waits for other tiles.

Messages in, messages out; how they travel is not known here. `TilePass` computes as far as it can
with what has come, and returns what it has for others:

    forward of a group     halos -> segments; before each normalisation all tiles' moments
    backward of a group    segments in reverse; at each normalisation all tiles' sums; then the
                           gradients of halos go to their owners, who add them

Where a group begins with a normalisation, moments go with the halos and sums with their gradients.
A backward computes what others wait for first; gradients of filters while it waits itself. Whatever
comes from others is added in the order of the tiles, not in that of its arrival.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from p2ptrain.model.stage.split_backward import WeightGradients, accumulate
from p2ptrain.plan.types.feature_maps import Region
from p2ptrain.tiling.grid import HaloTransfer
from p2ptrain.tiling.kernels.kernels import add_to, copied, cut_region, embed_region, region_view
from p2ptrain.tiling.kernels.recorded_segment import RecordedSegment
from p2ptrain.tiling.kernels.tile_machine import Key, TileMachine, Work
from p2ptrain.tiling.kernels.tile_program import TileProgram, run_segment
from p2ptrain.tiling.kernels.tile_steps import (
    GradientSums,
    Halo,
    HaloGradient,
    Moments,
    Normalise,
    TileMessage,
    TileSegment,
)
from p2ptrain.tiling.kernels.tiled_normalisation import Statistics, combined, moments


class _PendingNorm(NamedTuple):
    """A normalisation on the way back, for which other tiles' sums are missing.

    Attributes:
        x: what it read.
        own: the tile's own sums.
    """

    step: Normalise
    x: Tensor
    statistics: Statistics
    own: Tensor


class TilePass(TileMachine):
    """See the module. Forward, then (in training) backward, once each.

    Attributes:
        outputs: after the forward: what the tile owns of the maps that leave the tiled part.
        backward_from: groups from this one on have given their parameters' gradients.
    """

    def __init__(self, program: TileProgram, samples: int) -> None:
        """`samples`: of the micro-batch."""
        super().__init__(program, samples)
        self._inputs: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}  # maps between groups: what the tile owns
        self._gradients: dict[int, Tensor] = {}  # the same for gradients
        self._recorded: dict[tuple[int, int], RecordedSegment] = {}  # by group and step
        self._normalised: dict[int, tuple[Tensor, Statistics]] = {}  # by operation: x
        self._later: list[WeightGradients] = []
        self._reached: frozenset[int] = frozenset()  # maps that the backward reaches, on all tiles
        self.outputs: dict[int, Tensor] = {}
        self.backward_from = len(program.layout.groups)

    @property
    def kept(self) -> list[Tensor]:
        """Maps that it keeps for the backward, besides those that autograd keeps."""
        return [x for x, _ in self._normalised.values()]

    def begin_forward(self, inputs: Mapping[int, Tensor]) -> list[TileMessage]:
        """Start; `inputs` are `layout.input_region` of each of the model's inputs, by map.

        Returns:
            Messages for other tiles; so do `begin_backward` and `receive`.

        Raises:
            ProtocolError: an input has another shape than the tile's.
        """
        self._program.check_inputs(inputs, self._samples)
        self._inputs = dict(inputs)
        return self._begin(self._forward())

    def begin_backward(self, gradients: Mapping[int, Tensor | None]) -> list[TileMessage]:
        """Start the way back from the gradients of `outputs`, by map; None where there is none."""
        given = [number for number, gradient in gradients.items() if gradient is not None]
        self._reached = self._program.layout.network.reached_back_from(given)
        for number, gradient in gradients.items():
            if gradient is not None and number in self._reached:
                self._add(number, gradient)
        return self._begin(self._backward())

    # -- forward ---------------------------------------------------------------------------------

    def _forward(self) -> Work:
        program = self._program
        for place, group in enumerate(program.layout.groups):
            inner: dict[int, Tensor] = {}
            fused = program.fused[place]
            awaited = self._send_halos(place)
            own = None
            if fused is not None:
                own = self._send_moments(fused, self._values[fused.read])
                awaited += self._everyone(Moments(fused.operation))
            yield awaited
            self._assemble(place, group.entering, inner)
            for index, step in enumerate(program.steps[place]):
                if isinstance(step, TileSegment):
                    self._compute(place, index, step, inner)
                    continue
                if step is not fused or own is None:
                    own = self._send_moments(
                        step, region_view(inner[step.read], *self._regions(place, step.read))
                    )
                    yield self._everyone(Moments(step.operation))
                self._normalise(place, index, step, inner, own)
            if program.tracks:
                program.count(place)
            self._forget(group.end)
        leaving = program.layout.network.leaving
        self.outputs = {number: self._values[number] for number in leaving}
        self._values.clear()
        self._inputs.clear()

    def _send_halos(self, place: int) -> tuple[Key, ...]:
        """At the beginning of a group; what comes in return."""
        program, tile = self._program, self._program.tile
        transfers = program.layout.transfers[place]
        for transfer in transfers:
            if transfer.sender == tile:
                own = self._values[transfer.map]
                region = transfer.region.within(program.owned(transfer.map))
                self._send((transfer.receiver,), Halo(place, transfer.map), cut_region(own, region))
        return tuple((Halo(place, t.map), t.sender) for t in transfers if t.receiver == tile)

    def _assemble(self, place: int, entering: Iterable[int], inner: dict[int, Tensor]) -> None:
        """Fill `inner` with what the tile requires of each map that enters the group."""
        program, tile = self._program, self._program.tile
        pieces = [t for t in program.layout.transfers[place] if t.receiver == tile]
        for number in entering:
            if not program.layout.is_used(place, number):
                continue
            required = program.required(place, number)
            if number in self._inputs:
                held = program.layout.input_region(tile, number)
                inner[number] = region_view(self._inputs[number], held, required)
                continue
            own, mine = self._values[number], program.owned(number)
            arrived = [piece for piece in pieces if piece.map == number]
            if not arrived:
                inner[number] = region_view(own, mine, required.intersection(mine))
                continue
            here = required.intersection(mine)
            whole = own.new_empty((*own.shape[:2], required.rows.size, required.columns.size))
            if here.area:
                cut_region(whole, here.within(required)).copy_(region_view(own, mine, here))
            for piece in arrived:
                halo = self._take(Halo(place, number), piece.sender)
                cut_region(whole, piece.region.within(required)).copy_(halo)
            inner[number] = whole

    def _send_moments(self, step: Normalise, owned: Tensor) -> Tensor:
        own = moments(owned)
        self._send(self._others, Moments(step.operation), own)
        return own

    def _compute(self, place: int, index: int, step: TileSegment, inner: dict[int, Tensor]) -> None:
        program, network = self._program, self._program.layout.network
        uses = program.uses[place][index]
        recorded = RecordedSegment(program.parameters(step))
        values: dict[int, Tensor] = {}
        with torch.set_grad_enabled(program.trains):
            for number in step.reads:
                enters = program.trains and network.maps[number].differentiable
                values[number] = recorded.enter(number, inner[number]) if enters else inner[number]
            for number in uses.done:
                inner.pop(number, None)
            run_segment(
                *(program.instructions, step.operations, values),
                *(uses.last_reads, recorded.watch),
            )
            for number in step.gives:
                value = values.pop(number)
                if number in program.layout.groups[place].leaving:
                    owned = region_view(
                        value, program.required(place, number), program.owned(number)
                    )
                    self._values[number] = recorded.leave(number, owned, owned=True)
                if number in uses.later:
                    inner[number] = recorded.leave(number, value, owned=False)
        if program.trains:
            self._recorded[place, index] = recorded

    def _normalise(
        self, place: int, index: int, step: Normalise, inner: dict[int, Tensor], own: Tensor
    ) -> None:
        """When all tiles' moments are there; `own`: the tile's own."""
        program, layout, k = self._program, self._program.layout, step.operation
        x, held = inner[step.read], program.required(place, step.read)
        for number in program.uses[place][index].done:
            inner.pop(number, None)
        normalisation = program.normalisations[k]
        tiles = range(layout.tiles)
        parts = [own if t == program.tile else self._take(Moments(k), t) for t in tiles]
        counts = [layout.owned(t, step.read).area * self._samples for t in tiles]
        statistics = combined(parts, counts)
        if program.tracks:
            normalisation.track(statistics)
        y = normalisation.forward(
            region_view(x, held, program.required(place, step.made)), statistics
        )
        if program.trains:
            self._normalised[k] = x, statistics
        if step.made in layout.groups[place].leaving:
            self._values[step.made] = region_view(y, *self._regions(place, step.made))
        inner[step.made] = y

    def _forget(self, end: int) -> None:
        """Drop the maps that nothing behind unit `end` - 1 reads."""
        last = self._program.layout.network.last_unit_of_map
        for number in [n for n in self._values if last[n] < end]:
            del self._values[number]

    # -- backward --------------------------------------------------------------------------------

    def _backward(self) -> Work:
        program = self._program
        for place in reversed(range(len(program.layout.groups))):
            leaving = program.layout.groups[place].leaving
            owned = {n: self._gradients.pop(n) for n in leaving if n in self._gradients}
            inner: dict[int, Tensor] = {}
            fused, pending = program.fused[place], None
            for index, step in reversed([*enumerate(program.steps[place])]):
                if isinstance(step, TileSegment):
                    self._compute_back(place, index, step, inner, owned)
                    continue
                pending = self._send_sums(place, step, inner, owned)
                if pending is not None and step is not fused:
                    yield from self._weights()
                    yield self._everyone(GradientSums(step.operation))
                    self._subtract(place, pending, inner)
            awaited = self._send_halo_gradients(place, inner)
            yield from self._weights()
            self.backward_from = place
            if fused is not None and pending is not None:
                yield awaited + self._everyone(GradientSums(fused.operation))
                self._subtract(place, pending, inner)
            else:
                yield awaited
            self._collect(place, inner)
        self._gradients.clear()

    def _compute_back(
        self,
        place: int,
        index: int,
        step: TileSegment,
        inner: dict[int, Tensor],
        owned: Mapping[int, Tensor],
    ) -> None:
        recorded = self._recorded.pop((place, index))
        gradients = recorded.backward(inner, owned)
        self._later.append(recorded.later)
        for number in step.gives:
            inner.pop(number, None)
        for number, gradient in gradients.items():
            add_to(inner, number, gradient)

    def _weights(self) -> Work:
        """Gradients of filters that were put off; what was said before goes out first."""
        if not self._later:
            return
        yield None
        for later in self._later:
            deque(later.compute(accumulate), maxlen=0)
        self._later.clear()

    def _send_sums(
        self,
        place: int,
        step: Normalise,
        inner: dict[int, Tensor],
        owned: Mapping[int, Tensor],
    ) -> _PendingNorm | None:
        """Back through a normalisation, but for what its statistics change; None = all is done."""
        program, k = self._program, step.operation
        x, statistics = self._normalised.pop(k)
        if step.made not in self._reached:
            return None
        held = program.required(place, step.read)
        made = program.required(place, step.made)
        if step.made in owned:
            leaving = embed_region(owned[step.made], program.owned(step.made), made)
            add_to(inner, step.made, leaving)
        gradient = inner.pop(step.made, None)
        if gradient is None:
            gradient = self._zeros(step.made, made)
        normalisation = program.normalisations[k]
        through, sums = normalisation.sums(gradient, region_view(x, held, made), statistics)
        normalisation.accumulate(sums)
        if step.read not in self._reached:
            return None
        own = sums.double()
        self._send(self._others, GradientSums(k), own)
        add_to(inner, step.read, embed_region(through, made, held))
        return _PendingNorm(step, x, statistics, own)

    def _subtract(self, place: int, pending: _PendingNorm, inner: Mapping[int, Tensor]) -> None:
        """With all tiles' sums: what the statistics change of the tile's own part."""
        program, step = self._program, pending.step
        totals = torch.zeros_like(pending.own)
        for tile in range(program.layout.tiles):
            subject = GradientSums(step.operation)
            totals += pending.own if tile == program.tile else self._take(subject, tile)
        regions = self._regions(place, step.read)
        program.normalisations[step.operation].subtract(
            region_view(inner[step.read], *regions),
            region_view(pending.x, *regions),
            pending.statistics,
            totals,
        )

    def _send_halo_gradients(self, place: int, inner: Mapping[int, Tensor]) -> tuple[Key, ...]:
        """Give the gradients of what entered the group to the owners; what comes in return."""
        program, tile = self._program, self._program.tile
        transfers = self._crossed_back(place)
        for transfer in transfers:
            if transfer.receiver == tile:
                required = program.required(place, transfer.map)
                gradient = inner.get(transfer.map)
                if gradient is None:
                    piece = self._zeros(transfer.map, transfer.region)
                else:
                    piece = region_view(gradient, required, transfer.region)
                self._send((transfer.sender,), HaloGradient(place, transfer.map), piece)
        return tuple(
            (HaloGradient(place, t.map), t.receiver) for t in transfers if t.sender == tile
        )

    def _collect(self, place: int, inner: Mapping[int, Tensor]) -> None:
        """Add up the gradients of the tile's own part of what entered the group."""
        program, tile = self._program, self._program.tile
        sums: dict[int, Tensor] = {}
        for number, gradient in inner.items():
            required, mine = program.required(place, number), program.owned(number)
            here = required.intersection(mine)
            if here.area:  # a copy: what autograd gave may be another map's gradient too
                sums[number] = copied(region_view(gradient, required, here), here, mine)
        for transfer in self._crossed_back(place):
            if transfer.sender == tile:
                arrived = self._take(HaloGradient(place, transfer.map), transfer.receiver)
                whole = program.owned(transfer.map)
                if transfer.map not in sums:
                    sums[transfer.map] = self._zeros(transfer.map, whole)
                cut_region(sums[transfer.map], transfer.region.within(whole)).add_(arrived)
        for number, gradient in sums.items():
            self._add(number, gradient)

    def _crossed_back(self, place: int) -> list[HaloTransfer]:
        return [t for t in self._program.layout.transfers[place] if t.map in self._reached]

    def _add(self, number: int, gradient: Tensor) -> None:
        add_to(self._gradients, number, gradient)

    # -- regions ---------------------------------------------------------------------------------

    def _regions(self, place: int, number: int) -> tuple[Region, Region]:
        """What the tile has of a map inside the group, and what it owns."""
        return self._program.required(place, number), self._program.owned(number)

    def _zeros(self, number: int, region: Region) -> Tensor:
        channels = self._program.layout.network.maps[number].channels
        shape = self._samples, channels, region.rows.size, region.columns.size
        return torch.zeros(shape, dtype=self._program.dtype)
