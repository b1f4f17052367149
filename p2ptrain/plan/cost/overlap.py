"""What the runtime really does beyond the plain cost model (`plan --overlap`, `train`).

    overheads    every message and byte costs both ends time of the core that computes
                 (`cluster.Overheads`); the holder's feeding costs the holder
    streaming    a message is sent, carried and read at the same time, block after block
    update       takes time, as does what a round costs whatever its size (orders, reports, events).
                 It is committed everywhere or nowhere, once every stage is done with the round; but
                 a stage updates when it is done itself, snapshots the old weights, and begins the
                 next round, whose update waits for the commit
    prefetch     a round's first two micro-batches have arrived when it begins: the holder feeds
                 across rounds
    rounds       follow one another: a stage begins the next one when it has updated, while others
                 are still in the one before
    all-reduce   in buckets of gradients, each started when the last backward has come past its
                 units everywhere, over the ring's own links (`gradient_sums.py`)
    split        a backward in two parts takes a little longer than in one

Message costs are part of the tasks before or after them; those of an all-reduce are extra.
Asynchronously there are no rounds: messages and streaming cost the same, and an update, with what a
mini-batch costs whatever its size, is part of the backward that it follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from p2ptrain.plan.types.cluster import REFERENCE, ClusterDevice, ClusterLink
from p2ptrain.plan.types.gradient_sums import BucketSizes, ring_bytes, ring_steps
from p2ptrain.plan.types.profile import Profile

PREFETCHED_PIECES = 2

FEED_MESSAGES = 1.5
"""A piece of the holder's and the credit that answers it, which carries no tensor."""

LOAD_MESSAGES = 3.0
"""What the holder spends on reading and collating a piece of ready tensors, in messages."""

ROUND_MESSAGES = 10.0
"""What a round costs each of its devices whatever its size, in messages."""

SPLIT_FACTOR = 1.03
"""How many times as long a backward takes in two pieces, inputs and weights."""

COPY_PART = 0.8
"""What a copy of parameters and optimizer state takes of their update: a byte is read and one
written, where an update with momentum reads three for every two it writes."""


@dataclass(frozen=True, slots=True)
class CostBucket:
    """Gradients that are summed together.

    Attributes:
        summed_bytes: of them.
        first: the lowest unit they belong to; a backward past it has made them all.
    """

    summed_bytes: int
    first: int


@dataclass(frozen=True, slots=True)
class HolderFeed:
    """What the holder sends to the devices at one end of the pipeline in a round."""

    pieces: int
    samples: int


class OverlapCosts:
    """Overheads of every device for one profile; devices are indexes as in `CostModel`."""

    def __init__(self, profile: Profile, devices: Sequence[ClusterDevice], holder: int) -> None:
        self._profile = profile
        self._holder = holder
        count = len(profile.units)
        self._gradients = [profile.state(i, i + 1).summed_bytes for i in range(count)]
        self._buckets: dict[tuple[int, int, BucketSizes], tuple[CostBucket, ...]] = {}
        self.overheads = tuple(
            device.overheads or REFERENCE.times_slowdown(_slowdown(profile, device))
            for device in devices
        )

    def task_seconds(self, device: int, first: int, end: int, samples: int) -> tuple[float, float]:
        """What (a forward, a backward) of units [first, end) takes beside its computing."""
        profile, own = self._profile, self.overheads[device]
        last = len(profile.units)
        cuts = [profile.units[cut - 1].output_bytes for cut in (first, end) if 0 < cut < last]
        each = len(cuts) * own.message_seconds + sum(cuts) * samples * own.byte_seconds
        return each + self.feed_seconds(device, first, end, samples), each

    def feeding_seconds(self, inputs: HolderFeed, targets: HolderFeed, micro_batches: int) -> float:
        """What it takes the holder to load a round's pieces and to feed them to others."""
        own = self.overheads[self._holder]
        messages = LOAD_MESSAGES * micro_batches + FEED_MESSAGES * (inputs.pieces + targets.pieces)
        sent = inputs.samples * self._profile.input_bytes
        sent += targets.samples * self._profile.target_bytes
        return messages * own.message_seconds + sent * own.byte_seconds

    def feed_seconds(self, device: int, first: int, end: int, samples: int) -> float:
        """Of a piece's inputs and targets, at the holder's end and at the fed stages'.

        The holder's as if it had all samples of its stage: what it feeds to others with which it
        shares one comes on top (`feeding_seconds`).
        """
        profile, own = self._profile, self.overheads[device]
        at_start, at_end = first == 0, end == len(profile.units)
        if device == self._holder:
            at_start, at_end = not at_start, not at_end
        if at_start and at_end:
            fed, messages = profile.input_bytes + profile.target_bytes, 1
        else:
            fed = at_start * profile.input_bytes + at_end * profile.target_bytes
            messages = at_start + at_end
        loading = LOAD_MESSAGES * (device == self._holder)
        counted = (FEED_MESSAGES * messages + loading) * own.message_seconds
        return counted + fed * samples * own.byte_seconds

    def update_seconds(self, device: int, changing_bytes: int, *, ahead: bool = False) -> float:
        """Of an update that changes so many bytes, and of the round's own messages.

        `ahead`: with a copy of what was before.
        """
        own, passes = self.overheads[device], 1 + COPY_PART * ahead
        return (
            passes * changing_bytes * own.update_byte_seconds + ROUND_MESSAGES * own.message_seconds
        )

    def host_update_seconds(
        self, device: int, changing_bytes: int, trainable_bytes: int, *, ahead: bool = False
    ) -> float:
        """The same on the host of an accelerator, which then takes the weights.

        An estimate, not measured: the host is as fast at it as it is at messages, and a byte
        crosses into the accelerator at least as fast as one of a message does.
        """
        own = self.overheads[device]
        slowdown = own.message_seconds / REFERENCE.message_seconds
        return (
            (1 + COPY_PART * ahead) * changing_bytes * REFERENCE.update_byte_seconds * slowdown
            + trainable_bytes * own.byte_seconds
            + ROUND_MESSAGES * own.message_seconds
        )

    def reduce_seconds(self, device: int, parts: int, buckets: Sequence[CostBucket]) -> float:
        """What the messages of an all-reduce among `parts` devices cost one of them."""
        own = self.overheads[device]
        total_bytes = sum(bucket.summed_bytes for bucket in buckets)
        messages = len(buckets) * ring_steps(parts)
        sent_bytes = ring_bytes(parts, total_bytes)
        return 2 * (messages * own.message_seconds + sent_bytes * own.byte_seconds)

    def streamed_seconds(self, cut: int, ends: tuple[int, int], link: ClusterLink) -> float:
        """A sample before unit `cut`, of the time that the link between `ends` carries it.

        Meanwhile the sender still sends, or the receiver already reads, which their tasks count.
        """
        sender, receiver = (self.overheads[device] for device in ends)
        each = min(1 / link.bytes_per_s, sender.byte_seconds + receiver.byte_seconds)
        return self._profile.units[cut - 1].output_bytes * each

    def buckets(self, first: int, end: int, sizes: BucketSizes) -> tuple[CostBucket, ...]:
        """The gradients of units [first, end) in the order in which a backward makes them."""
        key = first, end, sizes
        if key not in self._buckets:
            self._buckets[key] = self._filled(first, end, sizes)
        return self._buckets[key]

    def turned_buckets(self, first: int, turn: int, sizes: BucketSizes) -> tuple[CostBucket, ...]:
        """The gradients of units [first, turn) in the order in which a forward wants them."""
        key = turn, first, sizes  # descending: none of `buckets`'
        if key not in self._buckets:
            buckets: list[CostBucket] = []
            before = gathered = 0
            lowest = first
            for unit in range(first, turn):
                gathered += self._gradients[unit]
                is_last = unit + 1 == turn and gathered > 0
                if gathered >= sizes.turned_bytes(before) or is_last:
                    buckets.append(CostBucket(gathered, lowest))
                    before, gathered, lowest = before + gathered, 0, unit + 1
            self._buckets[key] = tuple(buckets)
        return self._buckets[key]

    def _filled(self, first: int, end: int, sizes: BucketSizes) -> tuple[CostBucket, ...]:
        buckets: list[CostBucket] = []
        left = total = sum(self._gradients[first:end])
        gathered = 0
        for unit in range(end - 1, first - 1, -1):
            gathered += self._gradients[unit]
            if gathered >= sizes.next_bytes(total - left, left):
                buckets.append(CostBucket(gathered, unit))
                left -= gathered
                gathered = 0
        if gathered or not buckets:
            buckets.append(CostBucket(gathered, first))
        return tuple(buckets)


def _slowdown(profile: Profile, device: ClusterDevice) -> float:
    """How many times as long as the reference device it takes, by its own times if it has them."""
    if device.times is None:
        return device.slowdown
    samples = min(device.times.sizes)
    own, reference = device.times.at(samples), profile.times.at(samples)
    expected = sum(reference.forward) + sum(reference.backward)
    return (sum(own.forward) + sum(own.backward)) / expected if expected else 1.0
