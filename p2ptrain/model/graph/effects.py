"""What a node does besides computing: writing to its arguments, drawing random numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from p2ptrain.model.graph.nodes import (
    Argument,
    GraphNode,
    InputRef,
    NodeRef,
    Reference,
    TargetRef,
    references_in,
)
from p2ptrain.model.graph.operators import Operator, resolve

_SWITCHES = ("train", "training", "use_input_stats")

_PROBABILITIES = ("p", "dropout_p", "dropout")


def mutated_references(node: GraphNode) -> tuple[Reference, ...]:
    """The values that `node` writes to."""
    operator = resolve(node.operator)
    if not operator.mutates or (_is_statistics(operator) and _is_switched_off(node)):
        return ()
    written = [node.args[i] for i in sorted(operator.mutates) if i < len(node.args)]
    names = {operator.schema_arguments[i] for i in operator.mutates}
    written += [argument for name, argument in node.kwargs if name in names]
    return tuple(reference for argument in written for reference in references_in(argument))


def aliased_references(node: GraphNode) -> tuple[Reference, ...]:
    """The values that the result of `node` may share memory with."""
    positions = resolve(node.operator).returned
    if positions is None:
        return tuple(node.references())
    arguments = [node.args[i] for i in sorted(positions) if i < len(node.args)]
    return tuple(reference for argument in arguments for reference in references_in(argument))


def draws_random_numbers(node: GraphNode) -> bool:
    """Whether running `node` in the graph's mode draws from the random generator."""
    operator = resolve(node.operator)
    if not operator.seeded or _is_switched_off(node):
        return False
    for name, argument in named_arguments(node):
        if name in _PROBABILITIES and argument == 0 and "bernoulli" not in node.operator:
            return False
    # With dropout_p left out, attention draws nothing.
    given = dict(named_arguments(node))
    return "scaled_dot_product_attention" not in node.operator or "dropout_p" in given


def uses_batch_statistics(node: GraphNode) -> bool:
    """Whether running `node` computes with statistics over all samples of the micro-batch.

    Not an instance normalisation: what it keeps for evaluation is a plain mean over samples, which
    adds up from parts (`running_statistics`).
    """
    operator = resolve(node.operator)
    if not _is_statistics(operator) or _is_switched_off(node):
        return False
    return node.operator.split(".")[1] != "instance_norm"


def scales_by_frequency(node: GraphNode) -> bool:
    """Whether gradients of `node` are divided by how often the micro-batch has each index."""
    return any(
        name == "scale_grad_by_freq" and argument is True
        for name, argument in named_arguments(node)
    )


def _is_statistics(operator: Operator) -> bool:
    return "running_mean" in operator.schema_arguments


def _is_switched_off(node: GraphNode) -> bool:
    return any(name in _SWITCHES and argument is False for name, argument in named_arguments(node))


def named_arguments(node: GraphNode) -> Iterator[tuple[str, Argument]]:
    """The arguments that `node` gives, by the names of its operator's schema."""
    yield from zip(resolve(node.operator).schema_arguments, node.args, strict=False)
    yield from node.kwargs


def memory_of(nodes: Iterable[GraphNode], start: int) -> dict[Reference, frozenset[Reference]]:
    """Value of nodes numbered from `start` -> leaves, state and nodes whose memory it may be."""
    memory: dict[Reference, frozenset[Reference]] = {}
    for index, node in enumerate(nodes, start):
        for reference in node.references():
            memory.setdefault(reference, frozenset({reference}))
        shared = frozenset[Reference]().union(*(memory[r] for r in aliased_references(node)))
        memory[NodeRef(index)] = shared or frozenset({NodeRef(index)})
    return memory


def written_leaves(nodes: Sequence[GraphNode], start: int) -> frozenset[Reference]:
    """Leaves of the batch that some node writes to, directly or through a view."""
    memory = memory_of(nodes, start)
    written = (memory[reference] for node in nodes for reference in mutated_references(node))
    return frozenset(r for some in written for r in some if isinstance(r, InputRef | TargetRef))
