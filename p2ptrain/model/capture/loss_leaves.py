"""Which tensors of a batch go from the holder straight to the stages that use them.

Targets of the loss do, those that some node reads. So do labels that a model takes as inputs, where
it computes its loss itself (`loss=None`): entering the first stage, they would cross every cut.

    input_ids, attention_mask ──► stage 0 ──► stage 1 ──► stage 2 ──► loss
    labels ────────────────────────────────────────────────┘

What is a label shows in the graph, whatever its name is: it meets the model's results where no
product with weights follows. Labels that are decoder inputs too go straight to the decoder; an
image that an autoencoder takes and compares with goes to both of its ends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from p2ptrain.model.capture.aliases import traced_aliases
from p2ptrain.model.capture.translated import Translated
from p2ptrain.model.capture.units import heavy_nodes
from p2ptrain.model.graph.effects import draws_random_numbers, mutated_references
from p2ptrain.model.graph.nodes import GraphNode, InputRef, NodeRef, Reference, StateRef, TargetRef


def with_loss_leaves(
    train: Translated, evaluate: Translated, trainable: frozenset[str]
) -> tuple[Translated, Translated, tuple[int, ...]]:
    """Both graphs, reading as targets what the holder is to send where it is used.

    Args:
        train, evaluate: as traced; may be one.
        trainable: names of parameters that take gradients.

    Returns:
        The graphs, and for each of their targets the leaf of the batch that it is, counted over
        inputs and then targets.
    """
    graphs = [
        graph.arranged(_Uses(graph, trainable).late())
        for graph in ((train,) if evaluate is train else (train, evaluate))
    ]
    direct = [_Uses(graph, trainable).direct() for graph in graphs]
    read = {r for graph in graphs for node in graph.nodes for r in node.references()}
    targets = sorted(r.index for r in read if isinstance(r, TargetRef))
    inputs = sorted({leaf for found in direct for leaves in found.values() for leaf in leaves})
    sent: list[InputRef | TargetRef] = [*map(TargetRef, targets), *map(InputRef, inputs)]
    places = {leaf: TargetRef(place) for place, leaf in enumerate(sent)}
    made = [_reading(*pair, places) for pair in zip(graphs, direct, strict=True)]
    leaves = (*(len(train.inputs) + index for index in targets), *inputs)
    return made[0], made[-1], leaves


def _reading(
    graph: Translated,
    direct: Mapping[int, frozenset[int]],
    places: Mapping[InputRef | TargetRef, TargetRef],
) -> Translated:
    """`graph` with the references that the leaves get."""

    def node(index: int) -> GraphNode:
        straight = direct.get(index, frozenset())

        def place(reference: Reference) -> Reference:
            if isinstance(reference, InputRef):
                return places[reference] if reference.index in straight else reference
            return places[reference] if isinstance(reference, TargetRef) else reference

        return graph.nodes[index].reading(place)

    fakes = (graph.value_of(leaf) for leaf in places)
    return replace(graph, nodes=tuple(map(node, range(len(graph.nodes)))), targets=tuple(fakes))


class _Uses:
    """Of the leaves of a graph's input.

    Attributes:
        labels: leaves that nothing takes but the loss, and tables in which they are looked up.
    """

    def __init__(self, graph: Translated, trainable: frozenset[str]) -> None:
        self._graph = graph
        self._trainable = trainable
        self._heavy = heavy_nodes(graph)
        self._front = self._heavy.index(True) if True in self._heavy else len(self._heavy)
        self._aliases = traced_aliases(graph)
        self._written = self._aliases.written()
        self._next = self._following()
        self._feeds = self._feeding()
        self._origins = self._made_of()
        self._readers: dict[int, list[int]] = defaultdict(list)
        self._takers: dict[int, list[int]] = defaultdict(list)  # of a leaf, and of what it becomes
        for index, node in enumerate(graph.nodes):
            for reference in node.references():
                if isinstance(reference, InputRef):
                    self._readers[reference.index].append(index)
                if self._origins[index] is None:
                    for leaf in self._origin(reference) or ():
                        self._takers[leaf].append(index)
        self.labels = {leaf for leaf in self._readers if self._is_label(leaf)}

    def _is_label(self, leaf: int) -> bool:
        takers = self._takers[leaf]
        return (
            self._aliases.find(InputRef(leaf)) not in self._written
            and any(not self._feeds[k] for k in takers)
            and all(k > self._front and (self._heavy[k] or not self._feeds[k]) for k in takers)
        )

    def late(self) -> list[int]:
        """The order of the nodes with those that labels become just before they are taken."""
        moves = {k for k, made in enumerate(self._origins) if made and made <= self.labels}
        for root, writes in self._written.items():
            made = {r.index for r in self._aliases.members[root] if isinstance(r, NodeRef)}
            if not moves.isdisjoint(writes) and not made <= moves:
                return list(range(len(self._heavy)))
        places = list(range(len(self._heavy)))
        for index in sorted(moves, reverse=True):
            places[index] = min((places[k] for k in self._next[index]), default=index)
        return sorted(range(len(places)), key=lambda k: (places[k], k not in moves, k))

    def direct(self) -> dict[int, frozenset[int]]:
        """Node -> the leaves that it is to read as targets."""
        found: dict[int, set[int]] = defaultdict(set)
        for leaf, readers in self._readers.items():
            if self._aliases.find(InputRef(leaf)) in self._written:
                continue
            goes_late = leaf in self.labels and min(readers) > self._front
            is_apart = all(self._heavy[k] or not self._feeds[k] for k in readers)
            for reader in readers:
                if goes_late or (is_apart and reader > self._front and not self._feeds[reader]):
                    found[reader].add(leaf)
        return {index: frozenset(leaves) for index, leaves in found.items()}

    def _following(self) -> Sequence[Sequence[int]]:
        """Of each node, those that must run after it: what it makes, or writes to, is theirs."""
        readers: dict[Reference, list[int]] = defaultdict(list)
        for index, node in enumerate(self._graph.nodes):
            for reference in node.references():
                readers[reference].append(index)
        found = []
        for index, node in enumerate(self._graph.nodes):
            after = [*readers[NodeRef(index)]]
            for written in mutated_references(node):
                after += self._aliases.users(written)
            for reference in (NodeRef(index), *node.references()):
                after += self._written.get(self._aliases.find(reference), ())
            found.append([k for k in after if k > index])
        return found

    def _feeding(self) -> Sequence[bool]:
        """Of each node, whether it is a product with weights, or leads to one."""
        feeds = list(self._heavy)
        for index in range(len(feeds) - 1, -1, -1):
            feeds[index] = feeds[index] or any(feeds[k] for k in self._next[index])
        return feeds

    def _made_of(self) -> Sequence[frozenset[int] | None]:
        """The leaves of the input that a node follows from alone; None where from more."""
        found: list[frozenset[int] | None] = []
        self._origins = found
        for index, node in enumerate(self._graph.nodes):
            parts = [self._origin(reference) for reference in node.references()]
            if self._heavy[index] or draws_random_numbers(node):
                parts.append(None)
            known = [part for part in parts if part is not None]
            found.append(frozenset().union(*known) if len(known) == len(parts) else None)
        return found

    def _origin(self, reference: Reference) -> frozenset[int] | None:
        match reference:
            case InputRef():
                return frozenset({reference.index})
            case NodeRef():
                return self._origins[reference.index]
            case StateRef() if reference.name not in self._trainable:
                return None if self._aliases.find(reference) in self._written else frozenset()
        return None
