"""Where a graph may not be cut because values share memory with something that is written to.

Autograd refuses an in-place operator on what arrives from another device, and a device would not
see the other's write. So from the node that makes a value to the last one that writes to it or to a
view of it there is no cut, and a buffer that is written lives, with all its readers, in one unit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from p2ptrain.model.capture.translated import Translated
from p2ptrain.model.graph.effects import aliased_references, mutated_references
from p2ptrain.model.graph.nodes import GraphNode, InputRef, NodeRef, Reference, StateRef, TargetRef
from p2ptrain.model.tracing.autograd_graph import storage_of, tensors_in


class _Classes:
    """Values that may share memory, as disjoint sets."""

    def __init__(self) -> None:
        self._parent: dict[Reference, Reference] = {}

    def find(self, value: Reference) -> Reference:
        """The representative of the set that `value` is in."""
        root = value
        while self._parent.get(root, root) != root:
            root = self._parent[root]
        while value != root:
            self._parent[value], value = root, self._parent.get(value, root)
        return root

    def join(self, one: Reference, other: Reference) -> None:
        """Make one set of two."""
        self._parent[self.find(one)] = self.find(other)


class Aliases:
    """The values of one graph, sorted by the memory that they may share."""

    def __init__(self, nodes: Sequence[GraphNode], classes: _Classes) -> None:
        self._nodes = nodes
        self._classes = classes
        self.members: dict[Reference, set[Reference]] = defaultdict(set)
        self._users: dict[Reference, list[int]] = defaultdict(list)
        for index, node in enumerate(nodes):
            self._note(NodeRef(index), index)
            for reference in node.references():
                self._note(reference, index)

    def _note(self, reference: Reference, index: int) -> None:
        root = self.find(reference)
        self.members[root].add(reference)
        self._users[root].append(index)

    def find(self, value: Reference) -> Reference:
        """The representative of all values that may share memory with `value`."""
        return self._classes.find(value)

    def users(self, value: Reference) -> Sequence[int]:
        """The nodes that make or read what may share memory with `value`, ascending."""
        return self._users[self.find(value)]

    def written(self) -> Mapping[Reference, tuple[int, ...]]:
        """Representative of each set that is written to -> the nodes that do."""
        writes: dict[Reference, list[int]] = defaultdict(list)
        for index, node in enumerate(self._nodes):
            for root in {self.find(reference) for reference in mutated_references(node)}:
                writes[root].append(index)
        return {root: tuple(nodes) for root, nodes in writes.items()}

    def uncut_ranges(self) -> Iterator[tuple[int, int]]:
        """(first, last) nodes that must stay in one unit, for each set written to."""
        for root, writes in self.written().items():
            users = self._users[root]
            shared = any(isinstance(m, StateRef | TargetRef) for m in self.members[root])
            yield min(users), max(users) if shared else max(writes)

    def mutated(self) -> frozenset[StateRef | InputRef | TargetRef]:
        """Parameters, buffers, constants and leaves that running the graph writes to."""
        return frozenset(
            member
            for root in self.written()
            for member in self.members[root]
            if not isinstance(member, NodeRef)
        )


def traced_aliases(graph: Translated) -> Aliases:
    """By what operators declare, and by the memory that tracing saw (exact, but for one size)."""
    classes = _declared(graph.nodes)
    by_storage: dict[int, Reference] = {}

    def seen(reference: Reference, value: object) -> None:
        for storage in {storage_of(tensor) for tensor in tensors_in(value)}:
            classes.join(reference, by_storage.setdefault(storage, reference))

    for index, fake in enumerate(graph.inputs):
        seen(InputRef(index), fake)
    for index, fake in enumerate(graph.targets):
        seen(TargetRef(index), fake)
    for index, traced in enumerate(graph.traced):
        seen(NodeRef(index), traced.value)
    return Aliases(graph.nodes, classes)


def declared_aliases(nodes: Sequence[GraphNode]) -> Aliases:
    """By what operators declare alone: of a graph that arrived from elsewhere."""
    return Aliases(nodes, _declared(nodes))


def _declared(nodes: Sequence[GraphNode]) -> _Classes:
    classes = _Classes()
    for index, node in enumerate(nodes):
        for reference in aliased_references(node):
            classes.join(NodeRef(index), reference)
    return classes
