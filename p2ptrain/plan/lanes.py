"""From a draft to the engine's lanes and routes: who computes what, and who sends which samples.

A micro-batch of 6 samples between a stage that divides samples 4 : 2 and one that divides 3 : 3:

    sender    a a a a b b          routes  a -> c  3 samples
    receiver  c c c d d d                  a -> d  1 sample
                                           b -> d  2 samples

A device sends only the samples that the receiver needs, and never waits for others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from p2ptrain.plan.allocation import deal, sample_ranges
from p2ptrain.plan.cost import CostModel
from p2ptrain.plan.draft import Draft
from p2ptrain.plan.engine import FEED, AllReduce, Carried, Engine, Lane, Route
from p2ptrain.plan.schedule import Kind, one_f_one_b


def build_engine(cost: CostModel, draft: Draft, *, record: bool = False) -> Engine:
    """The engine that times one round of `draft`."""
    builder = _Builder(cost, draft)
    return Engine(builder.lanes(), draft.split.micro_batches, builder.reduces(), record)


@dataclass(frozen=True, slots=True)
class _Part:
    """What one device of a stage takes: its samples of a full and of the last micro-batch.

    `owners` is None where all devices of the stage divide every micro-batch, else the place of the
    device that takes each.
    """

    number: int
    place: int
    device: int
    full: tuple[int, int]
    last: tuple[int, int]
    owners: tuple[int, ...] | None

    def takes(self, micro_batch: int, *, is_last: bool) -> bool:
        """Whether it has a sample of that micro-batch."""
        if self.owners is not None:
            return self.owners[micro_batch] == self.place
        first, end = self.last if is_last else self.full
        return end > first


class _Builder:
    """Builds the lanes of one draft."""

    def __init__(self, cost: CostModel, draft: Draft) -> None:
        self.cost, self.draft, self.split = cost, draft, draft.split
        self.count = draft.split.micro_batches
        self.parts: list[tuple[_Part, ...]] = []
        number = 0
        for p in range(len(draft.groups)):
            self.parts.append(self._parts(p, number))
            number += len(self.parts[-1])

    def _parts(self, p: int, number: int) -> tuple[_Part, ...]:
        group, split = self.draft.groups[p], self.split
        whole = ((0, split.first_samples), (0, split.last_samples))
        if len(group.devices) == 1:
            return (_Part(number, 0, group.devices[0], *whole, owners=None),)
        if group.deals:
            owners = deal(group.shares)
            return tuple(
                _Part(number + i, i, device, *whole, owners)
                for i, device in enumerate(group.devices)
            )
        full = sample_ranges(group.shares, split.first_samples)
        last = sample_ranges(group.shares, split.last_samples)
        return tuple(
            _Part(number + i, i, device, full[i], last[i], owners=None)
            for i, device in enumerate(group.devices)
        )

    def lanes(self) -> list[Lane]:
        """All lanes, earlier stages first, in a stage in the order of its devices."""
        lanes = [self._lane(p, part) for p, parts in enumerate(self.parts) for part in parts]
        for p in range(1, len(self.parts)):
            self._connect(lanes, p)
        last = len(self.parts) - 1
        sizes = (self.cost.profile.input_bytes, self.cost.profile.target_bytes)
        if last == 0:
            self._feed(lanes, 0, sum(sizes))
        else:
            self._feed(lanes, 0, sizes[0])
            self._feed(lanes, last, sizes[1])
        return lanes

    def reduces(self) -> dict[int, AllReduce]:
        """The all-reduce of every stage of several devices."""
        return {
            p: AllReduce(
                p,
                self.cost.all_reduce_seconds(group.devices, *self.draft.units[p]),
                waits=sum(self._has_work(part) for part in self.parts[p]),
            )
            for p, group in enumerate(self.draft.groups)
            if len(group.devices) > 1
        }

    def _has_work(self, part: _Part) -> bool:
        return any(self._takes(part, m) for m in range(self.count))

    def _takes(self, part: _Part, micro_batch: int) -> bool:
        return part.takes(micro_batch, is_last=micro_batch == self.count - 1)

    def _lane(self, p: int, part: _Part) -> Lane:
        actions = one_f_one_b(self.count, self.draft.warmup[p])
        if len(self.parts[p]) > 1:
            actions = tuple(a for a in actions if self._takes(part, a.micro_batch))
        units = self.draft.units[p]
        full, ragged = (
            self.cost.stage_seconds(part.device, *units, end - first) if end > first else (0.0, 0.0)
            for first, end in (part.full, part.last)
        )
        return Lane(
            number=part.number,
            stage=p,
            device=part.device,
            actions=actions,
            seconds={"forward": (full[0], ragged[0]), "backward": (full[1], ragged[1])},
            missing={"forward": [0] * self.count, "backward": [0] * self.count},
            outputs=[[] for _ in range(self.count)],
            gradients=[[] for _ in range(self.count)],
        )

    def _connect(self, lanes: Sequence[Lane], p: int) -> None:
        """Routes between stages p-1 and p, and what they make each task wait for."""
        for sender in self.parts[p - 1]:
            for receiver in self.parts[p]:
                self._join(lanes[sender.number], lanes[receiver.number], sender, receiver)

    def _join(self, before: Lane, after: Lane, sender: _Part, receiver: _Part) -> None:
        each = self.cost.cut_bytes(self.draft.borders[after.stage])
        samples = _shared(sender.full, receiver.full), _shared(sender.last, receiver.last)
        there = self._route("output", sender.device, sender.number, receiver, samples, each)
        back = self._route("gradient", receiver.device, receiver.number, sender, samples, each)
        for m in range(self.count):
            common = samples[m == self.count - 1]
            if common and self._takes(sender, m) and self._takes(receiver, m):
                before.outputs[m].append(there)
                after.gradients[m].append(back)
                after.missing["forward"][m] += 1
                before.missing["backward"][m] += 1

    def _feed(self, lanes: Sequence[Lane], p: int, each: int) -> None:
        """Let the holder feed stage p `each` bytes a sample; what is its own costs nothing."""
        for part in self.parts[p]:
            if part.device == self.cost.holder:
                continue
            samples = part.full[1] - part.full[0], part.last[1] - part.last[0]
            lane = lanes[part.number]
            lane.feed = self._route("input", self.cost.holder, FEED, part, samples, each)
            lane.missing["forward"] = [count + 1 for count in lane.missing["forward"]]

    def _route(
        self,
        carries: Carried,
        uplink: int,
        sender: int,
        receiver: _Part,
        samples: tuple[int, int],
        each: int,
    ) -> Route:
        link = self.cost.link(uplink, receiver.device)
        wakes: Kind = "backward" if carries == "gradient" else "forward"
        return Route(
            carries=carries,
            sender=sender,
            receiver=receiver.number,
            uplink=uplink,
            downlink=receiver.device,
            wakes=wakes,
            seconds=(samples[0] * each / link.bytes_per_s, samples[1] * each / link.bytes_per_s),
            latency_s=link.latency_s,
        )


def _shared(one: tuple[int, int], other: tuple[int, int]) -> int:
    """How many samples two ranges have in common."""
    return max(0, min(one[1], other[1]) - max(one[0], other[0]))
