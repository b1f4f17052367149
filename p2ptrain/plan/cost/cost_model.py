"""The cost model: what a unit, a stage, a cut and a link cost, for one profile and cluster.

Devices are indexes into `CostModel.devices`, which is sorted by name, so that no answer depends on
the order in which a file lists them. All directed links are two matrices: a thousand devices have a
million of them. Symbols of this room:

    L units    P stages    p stage, from 0    M micro-batches    K_p warm-up depth of stage p
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from p2ptrain.errors import OptionError
from p2ptrain.plan.cost.overlap import SPLIT_FACTOR, OverlapCosts
from p2ptrain.plan.types.cluster import (
    PROCESSOR,
    Cluster,
    ClusterDevice,
    ClusterLink,
    unknown_device,
)
from p2ptrain.plan.types.gradient_sums import USUAL, BucketSizes, ring_seconds
from p2ptrain.plan.types.profile import Profile, StateBytes
from p2ptrain.plan.types.request import PlanMode, PlanRequest
from p2ptrain.plan.types.unit_times import TimeTable, UnitTimes
from p2ptrain.plan.types.weight_versions import Weights


class CostModel:
    """Answers about one profile on one cluster; keeps what it has computed.

    Attributes:
        devices: the cluster's devices, sorted by name.
        holder: index of the data holder.
        links: all links between them.
        unit_states: how large each unit is, apart from samples.
        overlap: what the runtime does beyond the plain model; None = the plain model.
        mode: whether rounds are timed, or steady asynchronous running.
        weights: asynchronously, which versions stages keep.
        full_depths: asynchronously, whether no stage's depth may be lowered to save memory.
        updates_ahead: with `overlap`, whether stages update before all are done with the round.
        is_mixed: its devices compute with different things.
        mixes: and may share a stage all the same: they update it on their hosts then.
    """

    def __init__(
        self,
        profile: Profile,
        cluster: Cluster,
        *,
        overlap: bool = False,
        mode: PlanMode = PlanMode.SYNC,
        weights: Weights = Weights.STASHED,
        full_depths: bool = False,
        updates_ahead: bool = True,
        mixes: bool = True,
    ) -> None:
        self.profile = profile
        self.mode = mode
        self.weights = weights
        self.full_depths = full_depths and mode is PlanMode.ASYNC
        self.updates_ahead = overlap and updates_ahead and mode is PlanMode.SYNC
        self.devices: tuple[ClusterDevice, ...] = tuple(
            sorted(cluster.devices, key=lambda d: d.name)
        )
        self.holder = next(i for i, device in enumerate(self.devices) if device.holder)
        self.unit_count = len(profile.units)
        self._tables = [_table(profile, device) for device in self.devices]
        self.links = LinkMatrix(cluster, self.devices)
        self.overlap = OverlapCosts(profile, self.devices, self.holder) if overlap else None
        self.unit_states = tuple(profile.state(i, i + 1) for i in range(self.unit_count))
        activations = accumulate((unit.activation_bytes for unit in profile.units), initial=0)
        self._activations = tuple(activations)
        self._states: dict[tuple[int, int], StateBytes] = {}
        self._held: dict[tuple[int, int], int] = {}
        self._unit_times: dict[tuple[int, int], UnitTimes] = {}
        self._worst: dict[tuple[int, ...], tuple[float, float]] = {}
        self.is_mixed = len({device.compute for device in self.devices}) > 1
        self.mixes = mixes and mode is PlanMode.SYNC
        firsts: dict[str, int] = {}  # device of each machine that has several
        self._interfaces = [
            firsts.setdefault(device.machine, number) if device.machine else number
            for number, device in enumerate(self.devices)
        ]
        self._stage_seconds: dict[tuple[int, int, int, int], tuple[float, float]] = {}
        self._split_seconds: dict[tuple[int, int, int, int], tuple[float, float, float]] = {}

    def name(self, device: int) -> str:
        """The device's name."""
        return self.devices[device].name

    def index(self, name: str) -> int:
        """The device of that name; OptionError where there is none."""
        for i, device in enumerate(self.devices):
            if device.name == name:
                return i
        raise unknown_device(name, [device.name for device in self.devices])

    def may_share(self, devices: Sequence[int]) -> bool:
        """Whether these may have one stage."""
        return self.mixes or self.are_alike(devices)

    def are_alike(self, devices: Sequence[int]) -> bool:
        """Whether their updates are the same, to the last bit, wherever each makes them."""
        if not self.is_mixed or len(devices) == 1:
            return True
        return len({self.devices[device].compute for device in devices}) == 1

    def interfaces(self, sender: int, receiver: int) -> tuple[int, int]:
        """The uplink and the downlink that a transfer occupies, a machine's by its first device.

        Inside one machine they are ways of these two alone, whose numbers follow those of devices.
        To itself both are the same: nothing is carried.
        """
        up, down = self._interfaces[sender], self._interfaces[receiver]
        if up != down or sender == receiver:
            return up, down
        return len(self.devices) + sender, len(self.devices) + receiver

    def unit_times(self, device: int, samples: int) -> UnitTimes:
        """Seconds of each unit on that device for `samples` samples."""
        key = device, samples
        if key not in self._unit_times:
            self._unit_times[key] = self._tables[device].at(samples)
        return self._unit_times[key]

    def stage_seconds(self, device: int, first: int, end: int, samples: int) -> tuple[float, float]:
        """(forward, backward) seconds of units [first, end) on that device."""
        key = device, first, end, samples
        if key not in self._stage_seconds:
            times = self.unit_times(device, samples)
            forward, backward = sum(times.forward[first:end]), sum(times.backward[first:end])
            if self.overlap is not None:
                more = self.overlap.task_seconds(device, first, end, samples)
                forward, backward = forward + more[0], backward + more[1]
                if self.mode is PlanMode.ASYNC:  # an update follows each backward
                    backward += self.update_seconds(device, first, end)
            self._stage_seconds[key] = forward, backward
        return self._stage_seconds[key]

    @property
    def can_split(self) -> bool:
        """Whether some device was found to spend time on gradients of weights."""
        return any(any(times.weight) for table in self._tables for times in table.times)

    def split_seconds(
        self, device: int, first: int, end: int, samples: int
    ) -> tuple[float, float, float]:
        """(forward, backward of the inputs, of the weights) where the backward is split."""
        key = device, first, end, samples
        if key not in self._split_seconds:
            forward, backward = self.stage_seconds(*key)
            times = self.unit_times(device, samples)
            weight = sum(times.weight[first:end])
            more = 0.0
            if self.overlap is not None:
                more = (SPLIT_FACTOR - 1) * sum(times.backward[first:end])
                weight *= SPLIT_FACTOR
            self._split_seconds[key] = forward, backward + more - weight, weight
        return self._split_seconds[key]

    def goes_ahead(self, devices: Collection[int]) -> bool:
        """Whether a plan's stages update before they know that all of its devices are done.

        The holder alone knows at once.
        """
        return self.updates_ahead and any(device != self.holder for device in devices)

    def update_seconds(
        self,
        device: int,
        first: int,
        end: int,
        *,
        group: Sequence[int] = (),
        ahead: bool = False,
    ) -> float:
        """Of an update of units [first, end); none in the plain model.

        Args:
            group: the devices that have them, where there are several.
            ahead: with a copy of what was before.
        """
        if self.overlap is None:
            return 0.0
        state = self.state(first, end)
        changing_bytes = state.changing_bytes
        if self.devices[device].compute != PROCESSOR and not self.are_alike(group or (device,)):
            sizes = changing_bytes, state.trainable_bytes
            return self.overlap.host_update_seconds(device, *sizes, ahead=ahead)
        return self.overlap.update_seconds(device, changing_bytes, ahead=ahead)

    def link(self, sender: int, receiver: int) -> ClusterLink:
        """That direction; from a device to itself nothing takes time."""
        return self.links.link(sender, receiver)

    def ring_links(self, devices: Sequence[int]) -> list[ClusterLink]:
        """Each device's to the next one, the last one's to the first."""
        hops = zip(devices, (*devices[1:], devices[0]), strict=True)
        return [self.link(*hop) for hop in hops]

    def bucket_sizes(self, devices: Sequence[int]) -> BucketSizes:
        """Of what these devices sum, in their ring's order; the plain model knows no buckets."""
        if len(devices) == 1 or self.overlap is None:
            return USUAL
        return BucketSizes.at(min(link.bytes_per_s for link in self.ring_links(devices)))

    def all_reduce_seconds(self, devices: Sequence[int], first: int, end: int) -> float:
        """Ring all-reduce of the gradients of units [first, end) over a group.

        2(g-1)/g · bytes / slowest link + 2(g-1) · largest latency, over all ordered pairs.
        """
        if len(devices) == 1:
            return 0.0
        worst = self._worst_link(tuple(sorted(devices)))
        return ring_seconds(len(devices), self.state(first, end).summed_bytes, *worst)

    def _worst_link(self, devices: tuple[int, ...]) -> tuple[float, float]:
        """(least bytes/s, largest latency) over all ordered pairs."""
        if devices not in self._worst:
            self._worst[devices] = self.links.worst(devices)
        return self._worst[devices]

    def cut_bytes(self, cut: int) -> int:
        """Bytes per sample that cross before unit `cut` (1 <= cut < L), in either direction."""
        return self.profile.units[cut - 1].output_bytes

    def streamed_seconds(self, cut: int, sender: int, receiver: int) -> float:
        """A sample before unit `cut`, of the time that its link carries it: its ends count it."""
        if self.overlap is None or sender == receiver:
            return 0.0
        return self.overlap.streamed_seconds(cut, (sender, receiver), self.link(sender, receiver))

    def activation_bytes(self, first: int, end: int) -> int:
        """Bytes per sample kept for the backward of units [first, end)."""
        return self._activations[end] - self._activations[first]

    def state(self, first: int, end: int) -> StateBytes:
        """How large units [first, end) are, apart from samples."""
        key = first, end
        if key not in self._states:
            self._states[key] = self.profile.state(first, end)
        return self._states[key]

    def held_bytes(self, first: int, end: int) -> int:
        """Parameters, gradients and optimizer state of units [first, end), rounded up."""
        key = first, end
        if key not in self._held:
            self._held[key] = self.state(first, end).held_bytes
        return self._held[key]

    def peak_bytes(self, first: int, end: int, samples: int, versions: int = 1) -> int:
        """Memory of a stage with at most `samples` forwarded and not yet backwarded.

        `versions` of its parameters are kept: more than one only in asynchronous running.
        """
        held = self.held_bytes(first, end)
        if versions > 1:
            held += (versions - 1) * self.state(first, end).trainable_bytes
        return held + samples * self.activation_bytes(first, end)

    def samples_that_fit(self, first: int, end: int, memory_bytes: int) -> int:
        """How many samples may be in flight in `memory_bytes`; below 0: not even the weights."""
        left = memory_bytes - self.held_bytes(first, end)
        if left < 0:
            return -1
        activations = self.activation_bytes(first, end)
        return left // activations if activations else sys.maxsize


def cost_model(profile: Profile, cluster: Cluster, request: PlanRequest) -> CostModel:
    """What plans are judged by: as `request` says, synchronous or not, with overlap or not.

    `auto` keeps kinds of devices apart: what they cost together is known too roughly.
    """
    return CostModel(
        *(profile, cluster),
        overlap=request.overlap,
        mode=request.mode,
        weights=request.weights,
        full_depths=request.full_depths,
        updates_ahead=request.updates_ahead,
        mixes=request.planner != "auto",
    )


def _table(profile: Profile, device: ClusterDevice) -> TimeTable:
    if device.times is None:
        return profile.times.times_slowdown(device.slowdown)
    if device.times.unit_count != len(profile.units):
        raise OptionError(
            f'cluster: the times of device "{device.name}" are of {device.times.unit_count} units, '
            f"the profile has {len(profile.units)}"
        )
    return device.times


Floats: TypeAlias = NDArray[np.float64]

TO_ITSELF = ClusterLink(bytes_per_s=math.inf, latency_s=0.0)
"""From a device to itself nothing takes time."""


class LinkMatrix:
    """The links between `devices`, by index.

    Attributes:
        rates: [n, n] float64 bytes/s from row to column; inf on the diagonal.
        latencies: [n, n] float64 seconds; 0 on the diagonal.
    """

    def __init__(self, cluster: Cluster, devices: Sequence[ClusterDevice]) -> None:
        self._names = [device.name for device in devices]
        self._links: dict[tuple[int, int], ClusterLink] = {}
        self._cluster = cluster
        default = cluster.default_link or TO_ITSELF  # then every direction is listed
        shape = len(devices), len(devices)
        self.rates: Floats = np.full(shape, default.bytes_per_s)
        self.latencies: Floats = np.full(shape, default.latency_s)
        place = {name: i for i, name in enumerate(self._names)}
        for (sender, receiver), link in cluster.links.items():
            at = place[sender], place[receiver]
            self.rates[at], self.latencies[at] = link.bytes_per_s, link.latency_s
        np.fill_diagonal(self.rates, TO_ITSELF.bytes_per_s)
        np.fill_diagonal(self.latencies, TO_ITSELF.latency_s)

    def link(self, sender: int, receiver: int) -> ClusterLink:
        """That direction."""
        pair = sender, receiver
        link = self._links.get(pair)
        if link is None:
            link = self._links[pair] = self._between(sender, receiver)
        return link

    def _between(self, sender: int, receiver: int) -> ClusterLink:
        if sender == receiver:
            return TO_ITSELF
        return self._cluster.link(self._names[sender], self._names[receiver])

    def worst(self, devices: Sequence[int]) -> tuple[float, float]:
        """(least bytes/s, largest latency) over all ordered pairs of at least two devices."""
        pairs = np.ix_(devices, devices)
        return float(self.rates[pairs].min()), float(self.latencies[pairs].max())
