"""How well a link is used: filled, lean, urgent things first. Needs root (network namespaces).

    python tools/wire_speed.py [--rates 100mbit 1gbit] [--seconds 6] [--only fill cpu] [--json F]

Two devices, each a process in a network namespace of its own, both cables limited by `tc tbf`.
In the same run, taking turns:

    fill      tensors of 0.1 to 4 MB both ways, several in flight, beside asyncio's TCP streams
    compute   the same while a thread of each device trains
    cpu       the processors' seconds per GB (both devices), beside asyncio's TLS streams
    lanes     how long a 100 kB tensor and a heartbeat take while all-reduce and weights stream,
              and how much of the link the lower lanes still use

The nominal rate counts every byte of the Ethernet frames; a full frame of 1514 bytes carries 1448
bytes of TCP payload, so at most 95.6 % of it is payload. Of that TLS and our frames take 0.2 %.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.testbed.network import Network  # noqa: E402
from tools.wire_device import TENSOR_BYTES, Duty, Stream, identity  # noqa: E402

PAYLOAD_OF_FRAME = 1448 / 1514
TENSORS = Stream(lane=1, part_bytes=TENSOR_BYTES, in_flight=4)
SCENARIOS = ("fill", "compute", "cpu", "lanes")
LANE_NAMES = {0: "heartbeat", 1: "tensor", 2: "collective", 3: "bulk"}
LANES = (
    Stream(lane=0, part_bytes=(0,), every_seconds=0.05),
    Stream(lane=1, part_bytes=(100_000,), every_seconds=0.1),
    Stream(lane=2, part_bytes=(1_000_000,), every_seconds=0.4),
    Stream(lane=3, part_bytes=(4_000_000,), in_flight=2),
)


@dataclass(frozen=True, slots=True)
class Bench:
    """Where measurements run.

    Attributes:
        network: two devices.
        folder: with their keys, "left" and "right".
        rate: as `tc` writes it.
    """

    network: Network
    folder: Path
    rate: str
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        """The nominal rate."""
        units = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
        return float(self.rate[:-4]) * units[self.rate[-4:]] / 8

    def duty(self, kind: str, streams: Sequence[Stream]) -> Duty:
        """Both devices', but for who dials."""
        folder = str(self.folder)
        host = self.network.address(0)
        return Duty(kind, folder, "left", "right", host, 0, tuple(streams), seconds=self.seconds)

    def run(self, duty: Duty, answer: Sequence[Stream] | None = None) -> list[dict[str, Any]]:
        """The reports of both; `answer` is what the dialling one sends, if not the same."""
        listening = self._start(0, duty)
        assert listening.stdout is not None
        port = int(listening.stdout.readline())
        streams = duty.streams if answer is None else tuple(answer)
        dialling = self._start(
            1, replace(duty, own="right", peer="left", port=port, streams=streams)
        )
        return [_report(process) for process in (listening, dialling)]

    def _start(self, device: int, duty: Duty) -> subprocess.Popen[str]:
        script = str(ROOT / "tools" / "wire_device.py")
        command = [*self.network.prefix(device), sys.executable, script, duty.text()]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _report(process: subprocess.Popen[str]) -> dict[str, Any]:
    output, _ = process.communicate(timeout=200)
    if process.returncode:
        raise SystemExit(f"a device failed with exit code {process.returncode}")
    report: dict[str, Any] = json.loads(output.splitlines()[-1])
    return report


def filled(bench: Bench, compute: bool) -> dict[str, Any]:
    """Share of what can be carried, per direction; the worse direction counts."""
    result: dict[str, Any] = {"rate": bench.rate, "compute": compute}
    for kind in ("tcp", "link"):
        reports = bench.run(replace(bench.duty(kind, [TENSORS]), compute=compute))
        worse = min(report["bytes_per_s"] for report in reports)
        result[kind] = {
            "bytes_per_s": [round(report["bytes_per_s"]) for report in reports],
            "of_nominal": round(worse / bench.bytes_per_s, 4),
            "of_payload": round(worse / bench.bytes_per_s / PAYLOAD_OF_FRAME, 4),
        }
        if kind == "link":
            result[kind]["lost"] = [report["lost"] for report in reports]
    result["link_of_tcp"] = round(result["link"]["of_nominal"] / result["tcp"]["of_nominal"], 4)
    return result


def costs(bench: Bench, rounds: int) -> dict[str, Any]:
    """CPU seconds of both processes per GB (10^9 bytes) that arrived; medians of the rounds."""
    per_gb: dict[str, list[float]] = {"tls": [], "link": []}
    for _ in range(rounds):
        for kind, found in per_gb.items():
            reports = bench.run(bench.duty(kind, [TENSORS]))
            arrived = sum(sum(report["lane_bytes"].values()) for report in reports)
            found.append(sum(report["cpu_seconds"] for report in reports) / arrived * 1e9)
    tls, link = (statistics.median(per_gb[kind]) for kind in ("tls", "link"))
    return {
        "rate": bench.rate,
        "cpu_seconds_per_gb": {kind: [round(x, 3) for x in all_] for kind, all_ in per_gb.items()},
        "ratio": round(link / tls, 3),
    }


def lanes(bench: Bench) -> dict[str, Any]:
    """Delays of urgent messages on a link that less urgent ones fill."""
    reports = bench.run(bench.duty("link", LANES), answer=LANES)
    total = min(sum(report["lane_bytes"].values()) / report["seconds"] for report in reports)
    delays: dict[str, Any] = {}
    for lane, name in LANE_NAMES.items():
        every = [s for report in reports for s in report["delays_seconds"].get(str(lane), [])]
        if every:
            delays[name] = {
                "median_ms": round(statistics.median(every) * 1e3, 1),
                "p99_ms": round(sorted(every)[int(len(every) * 0.99)] * 1e3, 1),
                "most_ms": round(max(every) * 1e3, 1),
                "messages": len(every),
            }
    used = [
        {LANE_NAMES[int(lane)]: count for lane, count in report["lane_bytes"].items()}
        for report in reports
    ]
    return {
        "rate": bench.rate,
        "alone_ms": round(100_000 / bench.bytes_per_s / PAYLOAD_OF_FRAME * 1e3, 1),
        "delays": delays,
        "lane_bytes": used,
        "of_payload": round(total / bench.bytes_per_s / PAYLOAD_OF_FRAME, 4),
    }


def table(results: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """To be printed."""
    lines = []
    for name, result in results:
        head = f"{name:8} {result['rate']:8}"
        if name in ("fill", "compute"):
            lines += [
                f"{head} link {result['link']['of_payload']:.1%} of the payload rate, TCP "
                f"{result['tcp']['of_payload']:.1%}: link/TCP {result['link_of_tcp']:.1%}"
            ]
        elif name == "cpu":
            found = result["cpu_seconds_per_gb"]
            lines += [
                f"{head} CPU s/GB: TLS streams {found['tls']}, link {found['link']}: "
                f"ratio {result['ratio']:.2f}"
            ]
        else:
            lines += [f"{head} {result['of_payload']:.1%} of the payload rate used in all"]
            for lane, delay in result["delays"].items():
                lines.append(
                    f"{'':18}{lane:11} median {delay['median_ms']:7.1f} ms, "
                    f"99 % {delay['p99_ms']:7.1f} ms, most {delay['most_ms']:7.1f} ms "
                    f"({delay['messages']} messages)"
                )
    return "\n".join(lines)


def run_scenario(name: str, bench: Bench, rounds: int) -> dict[str, Any]:
    """One scenario at one rate."""
    if name == "cpu":
        return costs(bench, rounds)
    if name == "lanes":
        return lanes(bench)
    return filled(bench, compute=name == "compute")


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit"])
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=SCENARIOS)
    parser.add_argument("--seconds", type=float, default=6.0, help="measured time of each run")
    parser.add_argument("--rounds", type=int, default=3, help="of the processor's cost")
    parser.add_argument("--json", type=Path, help="write the results there")
    arguments = parser.parse_args()
    results: list[tuple[str, dict[str, Any]]] = []
    with tempfile.TemporaryDirectory() as name:
        for device in ("left", "right"):
            identity(Path(name), device)
        for rate in arguments.rates:
            with Network(2, rate) as network:
                bench = Bench(network, Path(name), rate, arguments.seconds)
                for scenario in arguments.only:
                    found = run_scenario(scenario, bench, arguments.rounds)
                    results.append((scenario, found))
                    print(table(results[-1:]), flush=True)
    if arguments.json:
        found_all = [{"scenario": name, **result} for name, result in results]
        arguments.json.write_text(json.dumps(found_all, indent=2) + "\n")


if __name__ == "__main__":
    main()
