"""Faults, drawn by the seed: what breaks, where, when and for how long.

The ranges follow TigerBeetle's VOPR and Jepsen's nemeses: each seed draws which kinds of fault
occur at all, so that some seeds are only about freezes, others only about partitions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from random import Random

from tests.simulation.device import Device
from tests.simulation.kernel import Kernel
from tests.simulation.network import LinkQuality, Network, Path


class Fault(StrEnum):
    """A kind of fault."""

    CRASH = "crash"
    POWER_OFF = "power off"
    FREEZE = "freeze"
    LONG_FREEZE = "long freeze"
    PARTITION = "partition"
    ONE_WAY = "one-way partition"
    ISOLATE = "isolate"
    LEAVE = "leave"
    SLOW_LINKS = "slow links"
    RENAME = "rename"


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """What a seed draws from.

    Attributes:
        kinds: kinds that may occur; each seed takes a random part of them.
        mean_interval_seconds: between two faults, exponentially distributed.
    """

    kinds: tuple[Fault, ...] = tuple(Fault)
    mean_interval_seconds: float = 3.0


class FaultInjector:
    """Breaks things until asked to stop."""

    def __init__(
        self,
        plan: FaultPlan,
        devices: list[Device],
        network: Network,
        kernel: Kernel,
        rng: Random,
    ) -> None:
        self._plan = plan
        self._devices = devices
        self._network = network
        self._kernel = kernel
        self._rng = rng
        self._stopped = False
        self.kinds = sorted(rng.sample(plan.kinds, rng.randint(1, len(plan.kinds))))
        self.injected: list[str] = []
        self._actions: dict[Fault, Callable[[], str]] = {
            Fault.CRASH: lambda: self._end(Device.crash),
            Fault.POWER_OFF: lambda: self._end(Device.power_off),
            Fault.FREEZE: lambda: self._freeze(0.1, 2.0),
            Fault.LONG_FREEZE: lambda: self._freeze(2.0, 15.0),
            Fault.PARTITION: lambda: self._partition(both_ways=True),
            Fault.ONE_WAY: lambda: self._partition(both_ways=False),
            Fault.ISOLATE: self._isolate,
            Fault.LEAVE: lambda: self._end(Device.leave),
            Fault.SLOW_LINKS: self._slow_links,
            Fault.RENAME: self._rename,
        }

    def start(self) -> None:
        """Inject the first fault after a random time."""
        delay = self._rng.expovariate(1 / self._plan.mean_interval_seconds)
        self._kernel.after(delay, b"fault", self._inject)

    def stop(self) -> None:
        """Heal the network, wake the frozen, start most of those that are down."""
        self._stopped = True
        self._network.quality.clear()
        self._network.heal_all()
        for device in self._devices:
            device.thaw()
            if not device.process_runs and self._rng.random() < 0.7:
                device.start()

    def _inject(self) -> None:
        if self._stopped:
            return
        kind = self._rng.choice(self.kinds)
        what = self._actions[kind]()
        self.injected.append(f"{self._kernel.now:.3f} {kind}: {what}")
        self.start()

    def _device(self) -> Device:
        running = [d for d in self._devices if d.process_runs]
        return self._rng.choice(running or self._devices)

    def _end(self, end: Callable[[Device], None]) -> str:
        """End a device; it comes back after a while."""
        device = self._device()
        running = [d for d in self._devices if d.process_runs]
        if len(running) < 2:
            return "spared the last device"
        end(device)
        run, keeps_disk = device.run, self._rng.random() < 0.7

        def restart() -> None:
            if not device.process_runs and device.run == run and not self._stopped:
                if not keeps_disk:
                    device.lose_disk()
                device.start()

        delay = self._rng.choice((0.01, 0.3, 2.0, 8.0)) * self._rng.uniform(0.5, 1.5)
        self._kernel.after(delay, b"restart " + device.id.encode(), restart)
        return f"{device.id}, back in {delay:.2f} s, {'with' if keeps_disk else 'without'} disk"

    def _freeze(self, least: float, most: float) -> str:
        running = [d for d in self._devices if d.process_runs]
        chosen = self._rng.sample(running, self._rng.randint(1, max(1, len(running) // 2)))
        for device in chosen:
            device.freeze(self._rng.uniform(least, most))
        return " ".join(device.id for device in chosen)

    def _partition(self, *, both_ways: bool) -> str:
        ids = [device.id for device in self._devices]
        part = self._rng.sample(ids, self._rng.randint(1, len(ids) - 1))
        rest = [id_ for id_ in ids if id_ not in part]
        paths = [(a, b) for a in part for b in rest]
        return self._cut(paths + [(b, a) for a, b in paths] if both_ways else paths)

    def _isolate(self) -> str:
        victim = self._device().id
        others = [d.id for d in self._devices if d.id != victim]
        return self._cut([(victim, o) for o in others] + [(o, victim) for o in others])

    def _cut(self, paths: list[Path]) -> str:
        seconds = self._rng.uniform(0.2, 20.0)
        self._network.cut(paths)

        def heal() -> None:
            if not self._stopped:
                self._network.heal(paths)

        self._kernel.after(seconds, b"heal", heal)
        return f"{seconds:.1f} s " + " ".join(f"{a}>{b}" for a, b in paths)

    def _slow_links(self) -> str:
        ids = [device.id for device in self._devices]
        mean = self._rng.choice((0.03, 0.1, 0.3))
        quality = LinkQuality(0.001, mean, duplicate_share=self._rng.choice((0.0, 0.1, 0.5)))
        paths = [(a, b) for a in ids for b in ids if a != b and self._rng.random() < 0.5]
        self._network.quality.update(dict.fromkeys(paths, quality))
        return f"{mean} s on {len(paths)} paths"

    def _rename(self) -> str:
        device = self._device()
        device.rename(f"device {device.id} {self._rng.randrange(1000)}")
        return device.id
