"""The backward of a user's function, out of the nodes that a trace has recorded behind its forward.

forward ... | arriving  g0  backward ...  | own_backward
              start                         what is made here
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from p2ptrain.errors import CaptureError
from p2ptrain.model.graph.effects import draws_random_numbers, mutated_references
from p2ptrain.model.graph.nodes import BackwardGraph, GraphNode, InputRef, NodeRef, Reference

ARRIVING = "p2ptrain.arriving"
"""What stands for the gradients, while a graph is translated; no operator: it never runs."""


def backward_graph(
    name: str,
    nodes: Sequence[GraphNode],
    start: int,
    arriving: Sequence[NodeRef],
    gradients: Sequence[Reference | None],
) -> tuple[BackwardGraph, tuple[Reference, ...]]:
    """The backward that nodes from `start` on compute, and what it takes of the graph around it.

    Args:
        name: of the user's function.
        nodes: all that there are so far; that at `start` makes `arriving`.
        gradients: the results, one for each input.

    Raises:
        CaptureError: it draws random numbers.
    """
    made = _needed(nodes, start, arriving, gradients)
    places: dict[Reference, InputRef | NodeRef] = {
        reference: InputRef(index) for index, reference in enumerate(arriving)
    }
    inside = {index: number for number, index in enumerate(made)}
    outside: list[Reference] = []
    read = [reference for index in made for reference in nodes[index].references()]
    for reference in [*read, *(g for g in gradients if g is not None)]:
        if isinstance(reference, NodeRef) and reference.index in inside:
            places[reference] = NodeRef(inside[reference.index])
        elif reference not in places:
            places[reference] = InputRef(len(arriving) + len(outside))
            outside.append(reference)
    moved = (nodes[index].reading(places.__getitem__) for index in made)
    graph = BackwardGraph(
        tuple(replace(n, name=f"n{k}", grad_enabled=False) for k, n in enumerate(moved)),
        tuple(None if g is None else places[g] for g in gradients),
    )
    if any(map(draws_random_numbers, graph.nodes)):
        raise CaptureError(
            f"{name}.backward draws random numbers, which other devices would draw otherwise. Draw "
            "them in its forward, and save them for the backward"
        )
    return graph, tuple(outside)


def _needed(
    nodes: Sequence[GraphNode],
    start: int,
    arriving: Sequence[NodeRef],
    gradients: Sequence[Reference | None],
) -> list[int]:
    """Those behind `start` that the gradients follow from, or that write to something."""
    given = {start, *(reference.index for reference in arriving)}
    needed = {g.index for g in gradients if isinstance(g, NodeRef)}
    for index in range(len(nodes) - 1, start, -1):
        if index in given or not (index in needed or mutated_references(nodes[index])):
            continue
        needed.add(index)
        needed.update(r.index for r in nodes[index].references() if isinstance(r, NodeRef))
    return sorted(index for index in needed - given if index > start)
