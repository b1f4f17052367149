"""One micro-batch on one tile, forward and back, as a machine that waits for other tiles.

Messages in, messages out; who carries them is not known here. `TilePass` computes as far as it can
with what has come, and says what it has for others:

    forward of a group     halos -> segments; before each normalisation everyone's moments
    backward of a group    segments in reverse; at each normalisation everyone's sums; then the
                           gradients of halos go to their owners, who add them

Whatever comes from others is added in the order of the tiles, not in that of its arrival.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from p2ptrain.errors import InternalError, ProtocolError
from p2ptrain.model.tiles.messages import (
    GradientSums,
    Halo,
    HaloGradient,
    Message,
    Moments,
    Subject,
)
from p2ptrain.model.tiles.normalisation import Statistics, combined, moments
from p2ptrain.model.tiles.program import TileProgram, cut, run_segment
from p2ptrain.model.tiles.recorded import Recorded
from p2ptrain.model.tiles.schedule import Normalise, Segment
from p2ptrain.tiles.span import Region

_Key: TypeAlias = tuple[Subject, int]
"""(what, from which tile)."""
_Work: TypeAlias = Generator[tuple[_Key, ...], None, None]
"""Yields what it waits for; goes on when that is there."""


class TilePass:
    """See the module. Forward, then (in training) backward, once each.

    Attributes:
        outputs: after the forward: what the tile owns of the maps that leave the tiled part.
        backward_from: groups from this one on have given their parameters' gradients.
    """

    def __init__(self, program: TileProgram, samples: int) -> None:
        self._program = program
        self._samples = samples
        self._inputs: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}  # maps between groups: what the tile owns
        self._gradients: dict[int, Tensor] = {}  # the same for gradients
        self._recorded: dict[tuple[int, int], Recorded] = {}  # by group and step
        self._normalised: dict[int, tuple[Tensor, Statistics]] = {}  # by operation: x
        self._inbox: dict[_Key, Tensor] = {}
        self._told: set[_Key] = set()
        self._awaited: tuple[_Key, ...] = ()
        self._outbox: list[Message] = []
        self._work: _Work | None = None
        self.outputs: dict[int, Tensor] = {}
        self.backward_from = len(program.layout.groups)

    @property
    def is_waiting(self) -> bool:
        """Whether a forward or backward has begun and not ended."""
        return self._work is not None

    @property
    def awaits(self) -> frozenset[tuple[Subject, int]]:
        """What it must be told, and by which tile, before it goes on; has not come yet."""
        if self._work is None:
            return frozenset()
        return frozenset(key for key in self._awaited if key not in self._inbox)

    @property
    def kept(self) -> list[Tensor]:
        """Maps that it keeps for the backward, besides those that autograd keeps."""
        return [x for x, _ in self._normalised.values()]

    def begin_forward(self, inputs: Mapping[int, Tensor]) -> list[Message]:
        """Start; `inputs` are `layout.input_region` of each of the model's inputs, by map.

        Returns:
            What other tiles must be told; so do `begin_backward` and `receive`.

        Raises:
            ProtocolError: an input has another shape than the tile's.
        """
        self._check_inputs(inputs)
        self._inputs = dict(inputs)
        return self._begin(self._forward())

    def begin_backward(self, gradients: Mapping[int, Tensor | None]) -> list[Message]:
        """Start the way back from the gradients of `outputs`, by map; None where there is none."""
        maps = self._program.layout.network.maps
        for number, gradient in gradients.items():
            if gradient is not None and maps[number].differentiable:
                self._add(number, gradient)
        return self._begin(self._backward())

    def receive(self, message: Message) -> list[Message]:
        """Take what another tile says, and go on if nothing else is missing.

        Raises:
            ProtocolError: this pass expects no such message, has it already, or it has another
                shape or element type.
        """
        key, tensor = (message.subject, message.sender), message.tensor
        expected = self._program.expected(message.subject, message.sender, self._samples)
        if expected != (tuple(tensor.shape), tensor.dtype) or key in self._told:
            raise ProtocolError(
                f"tile {message.sender} sent {message.subject} of {tuple(tensor.shape)} "
                f"{tensor.dtype} to tile {self._program.tile}, which expects "
                f"{'it once' if key in self._told else expected or 'no such thing'}"
            )
        self._told.add(key)
        self._inbox[key] = tensor
        return self._go_on()

    # -- going on --------------------------------------------------------------------------------

    def _begin(self, work: _Work) -> list[Message]:
        if self._work is not None:
            raise InternalError(f"tile {self._program.tile} is still at work")
        self._work = work
        self._awaited = ()
        return self._go_on()

    def _go_on(self) -> list[Message]:
        while self._work is not None and all(key in self._inbox for key in self._awaited):
            try:
                self._awaited = next(self._work)
            except StopIteration:
                self._work = None
        sent, self._outbox = self._outbox, []
        return sent

    def _send(self, receivers: Iterable[int], subject: Subject, tensor: Tensor) -> None:
        tile = self._program.tile
        self._outbox += [Message(tile, other, subject, tensor) for other in receivers]

    def _take(self, subject: Subject, sender: int) -> Tensor:
        return self._inbox.pop((subject, sender))

    @property
    def _others(self) -> list[int]:
        tiles = range(self._program.layout.tiles)
        return [tile for tile in tiles if tile != self._program.tile]

    # -- forward ---------------------------------------------------------------------------------

    def _forward(self) -> _Work:
        program = self._program
        for place, group in enumerate(program.layout.groups):
            inner: dict[int, Tensor] = {}
            yield from self._gather(place, group.entering, inner)
            for index, step in enumerate(program.steps[place]):
                if isinstance(step, Segment):
                    self._compute(place, index, step, inner)
                else:
                    yield from self._normalise(place, index, step, inner)
            if program.tracks:
                program.count(place)
            self._forget(group.end)
        leaving = program.layout.network.leaving
        self.outputs = {number: self._values[number] for number in leaving}
        self._values.clear()
        self._inputs.clear()

    def _gather(self, place: int, entering: Iterable[int], inner: dict[int, Tensor]) -> _Work:
        """Fill `inner` with what the tile requires of each map that enters the group."""
        program, tile = self._program, self._program.tile
        transfers = program.layout.transfers[place]
        for transfer in transfers:
            if transfer.sender == tile:
                own = self._values[transfer.map]
                region = transfer.region.within(program.owned(transfer.map))
                self._send((transfer.receiver,), Halo(place, transfer.map), cut(own, region))
        pieces = [transfer for transfer in transfers if transfer.receiver == tile]
        yield tuple((Halo(place, piece.map), piece.sender) for piece in pieces)
        for number in entering:
            if not program.layout.is_used(place, number):
                continue
            required = program.required(place, number)
            if number in self._inputs:
                held = program.layout.input_region(tile, number)
                inner[number] = _part(self._inputs[number], held, required)
                continue
            own, mine = self._values[number], program.owned(number)
            arrived = [piece for piece in pieces if piece.map == number]
            if not arrived:
                inner[number] = _part(own, mine, required.intersection(mine))
                continue
            here = required.intersection(mine)
            whole = own.new_empty((*own.shape[:2], required.rows.size, required.columns.size))
            if here.area:
                cut(whole, here.within(required)).copy_(_part(own, mine, here))
            for piece in arrived:
                halo = self._take(Halo(place, number), piece.sender)
                cut(whole, piece.region.within(required)).copy_(halo)
            inner[number] = whole

    def _compute(self, place: int, index: int, step: Segment, inner: dict[int, Tensor]) -> None:
        program, network = self._program, self._program.layout.network
        uses = program.uses[place][index]
        recorded = Recorded()
        values: dict[int, Tensor] = {}
        for number in step.reads:
            enters = program.trains and network.maps[number].differentiable
            values[number] = recorded.enter(number, inner[number]) if enters else inner[number]
        for number in uses.done:
            inner.pop(number, None)
        with torch.set_grad_enabled(program.trains):
            run_segment(program.instructions, step.operations, values, uses.last_reads)
            for number in step.gives:
                value = values.pop(number)
                if number in program.layout.groups[place].leaving:
                    owned = _part(value, program.required(place, number), program.owned(number))
                    self._values[number] = recorded.leave(number, owned, owned=True)
                if number in uses.later:
                    inner[number] = recorded.leave(number, value, owned=False)
        if program.trains:
            self._recorded[place, index] = recorded

    def _normalise(
        self, place: int, index: int, step: Normalise, inner: dict[int, Tensor]
    ) -> _Work:
        program, layout, k = self._program, self._program.layout, step.operation
        x, held, owned = inner[step.read], *self._regions(place, step.read)
        for number in program.uses[place][index].done:
            inner.pop(number, None)
        normalisation = program.normalisations[k]
        own = moments(_part(x, held, owned))
        self._send(self._others, Moments(k), own)
        yield tuple((Moments(k), other) for other in self._others)
        tiles = range(layout.tiles)
        parts = [own if t == program.tile else self._take(Moments(k), t) for t in tiles]
        counts = [layout.owned(t, step.read).area * self._samples for t in tiles]
        statistics = combined(parts, counts)
        if program.tracks:
            normalisation.track(statistics)
        with torch.no_grad():
            y = normalisation.forward(
                _part(x, held, program.required(place, step.made)), statistics
            )
        if program.trains:
            self._normalised[k] = x, statistics
        if step.made in layout.groups[place].leaving:
            self._values[step.made] = _part(y, *self._regions(place, step.made))
        inner[step.made] = y

    def _forget(self, end: int) -> None:
        """Drop the maps that nothing behind unit `end` - 1 reads."""
        last = self._program.layout.network.last_unit_of_map
        for number in [n for n in self._values if last[n] < end]:
            del self._values[number]

    # -- backward --------------------------------------------------------------------------------

    def _backward(self) -> _Work:
        program = self._program
        for place in reversed(range(len(program.layout.groups))):
            leaving = program.layout.groups[place].leaving
            owned = {n: self._gradients.pop(n) for n in leaving if n in self._gradients}
            inner: dict[int, Tensor] = {}
            for index, step in reversed([*enumerate(program.steps[place])]):
                if isinstance(step, Segment):
                    gradients = self._recorded.pop((place, index)).backward(inner, owned)
                    for number in step.gives:
                        inner.pop(number, None)
                    for number, gradient in gradients.items():
                        _add_to(inner, number, gradient)
                else:
                    yield from self._normalise_back(place, step, inner, owned)
            self.backward_from = place
            yield from self._scatter(place, inner)
        self._gradients.clear()

    def _normalise_back(
        self,
        place: int,
        step: Normalise,
        inner: dict[int, Tensor],
        owned: Mapping[int, Tensor],
    ) -> _Work:
        program, k = self._program, step.operation
        maps = program.layout.network.maps
        x, statistics = self._normalised.pop(k)
        if not maps[step.made].differentiable:
            return
        held, mine = self._regions(place, step.read)
        made = program.required(place, step.made)
        if step.made in owned:
            leaving = _embedded(owned[step.made], program.owned(step.made), made)
            _add_to(inner, step.made, leaving)
        gradient = inner.pop(step.made, None)
        if gradient is None:
            gradient = self._zeros(step.made, made)
        normalisation = program.normalisations[k]
        through, sums = normalisation.sums(gradient, _part(x, held, made), statistics)
        normalisation.accumulate(sums)
        if not maps[step.read].differentiable:
            return
        own = sums.double()
        self._send(self._others, GradientSums(k), own)
        yield tuple((GradientSums(k), other) for other in self._others)
        totals = torch.zeros_like(own)
        for tile in range(program.layout.tiles):
            totals += own if tile == program.tile else self._take(GradientSums(k), tile)
        through = _embedded(through, made, held)
        normalisation.subtract(_part(through, held, mine), _part(x, held, mine), statistics, totals)
        _add_to(inner, step.read, through)

    def _scatter(self, place: int, inner: Mapping[int, Tensor]) -> _Work:
        """Give the gradients of what entered the group to the owners, and take what is its own."""
        program, tile = self._program, self._program.tile
        maps = program.layout.network.maps
        transfers = [t for t in program.layout.transfers[place] if maps[t.map].differentiable]
        for transfer in transfers:
            if transfer.receiver == tile:
                required = program.required(place, transfer.map)
                gradient = inner.get(transfer.map)
                if gradient is None:
                    piece = self._zeros(transfer.map, transfer.region)
                else:
                    piece = _part(gradient, required, transfer.region)
                self._send((transfer.sender,), HaloGradient(place, transfer.map), piece)
        for number, gradient in inner.items():
            required, mine = program.required(place, number), program.owned(number)
            here = required.intersection(mine)
            if here.area:
                self._add(number, _embedded(_part(gradient, required, here), here, mine))
        sent = [transfer for transfer in transfers if transfer.sender == tile]
        yield tuple((HaloGradient(place, t.map), t.receiver) for t in sent)
        for transfer in sent:
            arrived = self._take(HaloGradient(place, transfer.map), transfer.receiver)
            whole = program.owned(transfer.map)
            self._add(transfer.map, _embedded(arrived, transfer.region, whole))

    def _add(self, number: int, gradient: Tensor) -> None:
        _add_to(self._gradients, number, gradient)

    # -- regions ---------------------------------------------------------------------------------

    def _regions(self, place: int, number: int) -> tuple[Region, Region]:
        """What the tile has of a map inside the group, and what it owns."""
        return self._program.required(place, number), self._program.owned(number)

    def _zeros(self, number: int, region: Region) -> Tensor:
        channels = self._program.layout.network.maps[number].channels
        shape = self._samples, channels, region.rows.size, region.columns.size
        return torch.zeros(shape, dtype=self._program.dtype)

    def _check_inputs(self, inputs: Mapping[int, Tensor]) -> None:
        layout = self._program.layout
        for number in layout.network.entering:
            region = layout.input_region(self._program.tile, number)
            channels = layout.network.maps[number].channels
            shape = self._samples, channels, region.rows.size, region.columns.size
            found = inputs[number]
            if tuple(found.shape) != shape or found.dtype is not self._program.dtype:
                raise ProtocolError(
                    f"tile {self._program.tile} takes {shape} {self._program.dtype} of the model's "
                    f"input, found {tuple(found.shape)} {found.dtype}: images must keep their size "
                    "within a job"
                )


def _part(tensor: Tensor, held: Region, wanted: Region) -> Tensor:
    """The `wanted` region of a tensor that holds `held`."""
    return tensor if wanted == held else cut(tensor, wanted.within(held))


def _embedded(tensor: Tensor, region: Region, whole: Region) -> Tensor:
    """A tensor of `whole` with `tensor` in its `region`, zeros around it."""
    if region == whole:
        return tensor
    shape = (*tensor.shape[:2], whole.rows.size, whole.columns.size)
    made = tensor.new_zeros(shape)
    cut(made, region.within(whole)).copy_(tensor)
    return made


def _add_to(gradients: dict[int, Tensor], number: int, gradient: Tensor | None) -> None:
    if gradient is not None:
        known = gradients.get(number)
        gradients[number] = gradient if known is None else known + gradient
