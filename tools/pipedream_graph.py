"""Turns a profile of PipeDream's public repository into a `p2ptrain.profile/1` file.

    python -m tools.pipedream_graph graph.txt --batch-size 128 --out vgg16.json

PipeDream (SOSP 2019) publishes profiles of real models on real GPUs as text graphs, one line a
node, then one line an edge:

    node2 -- Conv2d(3, 64) -- forward_compute_time=22.3, backward_compute_time=24.6,
        activation_size=1644167168.0, parameter_size=7168.0              (one line)
    \tnode2 -- node3

Times are milliseconds and sizes bytes of the whole measured mini-batch, whose size the file does
not say: 128 for most of its image models, 256 for AlexNet, 64 for DenseNet (the input's size over
that of one image), 32 for `gnmt` and 128 for `gnmt_large` (from their hidden states).

A model is a graph, a plan cuts a sequence. The nodes are put into a topological order that keeps
few bytes alive, the greedy way; a cut between two of them is crossed by every tensor produced
before it and used after it, each once (what its antichains amount to). Nodes that take no time
join the unit before them. Reading the inputs is no part of the model: `Input` nodes are left out,
and their sizes are what the data holder sends.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from p2ptrain.errors import OptionError
from p2ptrain.plan.types.profile import Profile, Unit
from p2ptrain.plan.types.unit_times import TimeTable, UnitTimes

_NODE = re.compile(
    r"(?P<name>\S+) -- (?P<kind>.*) -- forward_compute_time=(?P<forward>[^,]+), "
    r"backward_compute_time=(?P<backward>[^,]+), activation_size=(?P<activation>[^,]+), "
    r"parameter_size=(?P<parameter>\S+)(?: -- stage_id=\d+)?"
)
TARGET_BYTES = 8
"""A label a sample; the profiles do not hold targets."""


@dataclass(frozen=True, slots=True)
class Node:
    """One operator; times in seconds, sizes in bytes, of the whole measured mini-batch."""

    name: str
    kind: str
    forward_seconds: float
    backward_seconds: float
    output_bytes: float
    parameter_bytes: float

    @property
    def is_input(self) -> bool:
        """Whether it only reads data."""
        return self.kind.startswith("Input")

    @property
    def kept_bytes(self) -> float:
        """What its output adds to memory; nothing where it is a view or overwrites its input."""
        return 0.0 if self.is_free or "inplace" in self.kind else self.output_bytes

    @property
    def is_free(self) -> bool:
        """Whether it takes no time and has no parameters: a view, a piece of a tuple."""
        return not (self.forward_seconds or self.backward_seconds or self.parameter_bytes)


@dataclass(frozen=True, slots=True)
class Graph:
    """Nodes in file order and (producer, consumer) edges, by name."""

    nodes: Mapping[str, Node]
    edges: tuple[tuple[str, str], ...]

    def consumers(self) -> dict[str, list[str]]:
        """Who uses each node's output."""
        used: dict[str, list[str]] = {name: [] for name in self.nodes}
        for producer, consumer in self.edges:
            used[producer].append(consumer)
        return used

    def without(self, names: Iterable[str]) -> Graph:
        """The graph less these nodes and their edges."""
        gone = set(names)
        return Graph(
            {name: node for name, node in self.nodes.items() if name not in gone},
            tuple(edge for edge in self.edges if not gone.intersection(edge)),
        )


def read_graph(text: str) -> Graph:
    """The text of a graph file. OptionError names the line that is no node and no edge."""
    nodes: dict[str, Node] = {}
    edges: list[tuple[str, str]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("\t"):
            edges.append(_edge(line, number))
        elif line.strip():
            node = _node(line.strip(), number)
            nodes[node.name] = node
    for name in {name for edge in edges for name in edge} - set(nodes):
        raise OptionError(f'graph: an edge names "{name}", which no line describes')
    if not nodes:
        raise OptionError("graph: no node in the file")
    return Graph(nodes, tuple(edges))


def to_profile(graph: Graph, model: str, batch_size: int) -> Profile:
    """The graph as a sequence of units, sizes per sample, times for `batch_size` samples."""
    inputs = [name for name, node in graph.nodes.items() if node.is_input]
    unused = [
        name
        for name, consumers in graph.consumers().items()
        if not consumers and graph.nodes[name].kind.startswith("__getitem__")
    ]
    model_graph = graph.without([*inputs, *unused])
    units = unit_nodes(model_graph)
    crossing = crossing_bytes(model_graph, [unit[-1].name for unit in units])
    return Profile(
        model=model,
        input_bytes=_per_sample(sum(graph.nodes[n].output_bytes for n in inputs), batch_size),
        target_bytes=TARGET_BYTES,
        units=tuple(
            _unit(nodes, crossed, batch_size)
            for nodes, crossed in zip(units, crossing, strict=True)
        ),
        optimizer_state_ratio=1.0,
        times=TimeTable((batch_size,), (_times(units),)),
    )


def unit_nodes(graph: Graph) -> list[list[Node]]:
    """The nodes in order, those that take no time with the one before them (or the first)."""
    units: list[list[Node]] = []
    for name in linear_order(graph):
        node = graph.nodes[name]
        if units and (node.is_free or all(before.is_free for before in units[-1])):
            units[-1].append(node)
        else:
            units.append([node])
    return units


def linear_order(graph: Graph) -> list[str]:
    """A topological order: of the nodes whose inputs are there, the one that leaves the fewest
    bytes alive; of equals the one whose inputs are newest, so that branches are finished first.

    Raises:
        OptionError: the edges form a circle.
    """
    consumers = graph.consumers()
    producers: dict[str, list[str]] = {name: [] for name in graph.nodes}
    for producer, consumer in graph.edges:
        producers[consumer].append(producer)
    listed = {name: i for i, name in enumerate(graph.nodes)}
    missing = {name: len(producers[name]) for name in graph.nodes}
    uses = {name: len(consumers[name]) for name in graph.nodes}
    place: dict[str, int] = {}
    ready = [name for name in graph.nodes if not missing[name]]

    def cost(name: str) -> tuple[float, int, int]:
        born = graph.nodes[name].output_bytes if uses[name] else 0.0
        ends = [p for p in set(producers[name]) if uses[p] == producers[name].count(p)]
        newest = max((place[p] for p in producers[name]), default=-1)
        return born - sum(graph.nodes[p].output_bytes for p in ends), -newest, listed[name]

    while ready:
        name = min(ready, key=cost)
        ready.remove(name)
        place[name] = len(place)
        for producer in producers[name]:
            uses[producer] -= 1
        for consumer in consumers[name]:
            missing[consumer] -= 1
            if not missing[consumer]:
                ready.append(consumer)
    if len(place) < len(graph.nodes):
        circle = ", ".join(sorted(set(graph.nodes) - set(place)))
        raise OptionError(f"graph: the edges form a circle among or before {circle}")
    return list(place)


def crossing_bytes(graph: Graph, lasts: Sequence[str]) -> list[float]:
    """Bytes that cross after each of `lasts` (in order): tensors made before and used after."""
    place = {name: i for i, name in enumerate(linear_order(graph))}
    last_use = {
        name: max((place[consumer] for consumer in consumers), default=place[name])
        for name, consumers in graph.consumers().items()
    }
    return [
        sum(
            node.output_bytes
            for name, node in graph.nodes.items()
            if place[name] <= place[last] < last_use[name]
        )
        for last in lasts
    ]


def _node(line: str, number: int) -> Node:
    found = _NODE.fullmatch(line)
    if found is None:
        raise OptionError(f"graph: line {number} is neither a node nor an edge: {line[:60]!r}")
    return Node(
        name=found["name"],
        kind=found["kind"],
        forward_seconds=_number(found["forward"], number) / 1000,
        backward_seconds=_number(found["backward"], number) / 1000,
        output_bytes=sum(_number(size, number) for size in _sizes(found["activation"])),
        parameter_bytes=_number(found["parameter"], number),
    )


def _sizes(text: str) -> list[str]:
    """One size, or several: `[6291456.0; 131072.0]`."""
    return text.strip("[]").split(";")


def _number(text: str, number: int) -> float:
    try:
        value = float(text)
    except ValueError:
        raise OptionError(f"graph: line {number}: {text!r} is no number") from None
    if not 0 <= value < float("inf"):
        raise OptionError(f"graph: line {number}: {text!r} is no time or size")
    return value


def _edge(line: str, number: int) -> tuple[str, str]:
    ends = line.strip().split(" -- ")
    if len(ends) != 2:
        raise OptionError(f"graph: line {number}: expected two nodes, found {line.strip()!r}")
    return ends[0], ends[1]


def _unit(nodes: Sequence[Node], crossed: float, batch_size: int) -> Unit:
    """Kept for the backward is taken to be every output of the unit with memory of its own."""
    return Unit(
        name=nodes[0].name,
        parameter_bytes=round(sum(node.parameter_bytes for node in nodes)),
        output_bytes=_per_sample(crossed, batch_size),
        activation_bytes=_per_sample(sum(node.kept_bytes for node in nodes), batch_size),
    )


def _per_sample(size_bytes: float, batch_size: int) -> int:
    return round(size_bytes / batch_size)


def _times(units: Sequence[Sequence[Node]]) -> UnitTimes:
    return UnitTimes(
        forward=tuple(sum(node.forward_seconds for node in unit) for unit in units),
        backward=tuple(sum(node.backward_seconds for node in unit) for unit in units),
    )


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("graph", type=Path, help="a graph.txt of PipeDream's profiler")
    parser.add_argument("--batch-size", type=int, required=True, help="the measured mini-batch")
    parser.add_argument("--model", help="name in the profile (default: the graph's folder)")
    parser.add_argument("--out", type=Path, required=True, help="write the profile here")
    return parser.parse_args()


def main() -> int:
    """Read, convert, write, tell the sizes."""
    args = parse()
    try:
        graph = read_graph(args.graph.read_text(encoding="utf-8"))
        model = args.model or args.graph.absolute().parent.name
        profile = to_profile(graph, model, args.batch_size)
    except (OSError, OptionError) as error:
        print(f"pipedream_graph: {error}", file=sys.stderr)
        return 1
    args.out.write_text(json.dumps(profile.to_json(), indent=1) + "\n", encoding="utf-8")
    print(f"{len(graph.nodes)} nodes, {len(profile.units)} units: {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
