"""What backwards of the user's keep, and who else writes to it or reads it.

Plain torch notices writes to what save_for_backward keeps, and refuses the backward; what is kept
as an attribute of `ctx` it does not watch. A device would notice both, while it trains.
"""

from __future__ import annotations

from collections import Counter

from p2ptrain.errors import CaptureError
from p2ptrain.model.aliases import Aliases
from p2ptrain.model.backward_graph import inputs_written
from p2ptrain.model.graph import BackwardGraph, NodeRef, Reference, StateRef, references_in
from p2ptrain.model.own_backward import OWN_BACKWARD
from p2ptrain.model.translate import Translated


def refuse_written(graph: Translated, aliases: Aliases) -> None:
    """Look at every function with its own backward.

    A backward may write to what its forward has made for it alone, such as a gradient that is only
    to be scaled: it runs once. Tensors of the state that a forward writes to are left to
    `rewritten`.

    Raises:
        CaptureError: a tensor that is kept is written to after the forward, or by a backward though
            it is not its own.
    """
    all_kept = _all_kept(graph)
    written = aliases.written() if all_kept else {}
    keepers: Counter[Reference] = Counter()
    for index, kept in all_kept:
        keepers.update(map(aliases.find, kept))
        for reference in kept:
            root = aliases.find(reference)
            is_state = any(isinstance(member, StateRef) for member in aliases.members[root])
            if not is_state and max(written.get(root, (0,))) > index:
                raise CaptureError(
                    f"{graph.traced[index].function} keeps a tensor for its backward that is "
                    "written to after its forward. Keep a copy: tensor.clone()"
                )
    for index, kept in all_kept:
        outputs, *_, backward = graph.nodes[index].args
        assert isinstance(outputs, tuple)
        assert isinstance(backward, BackwardGraph)
        for position in inputs_written(backward):
            root = aliases.find(kept[position - len(outputs)])
            is_made = all(isinstance(member, NodeRef) for member in aliases.members[root])
            if not is_made or keepers[root] > 1:
                raise CaptureError(
                    f"{graph.traced[index].function}.backward writes to a tensor that is not its "
                    "own, which other devices would not follow. Write to a copy (tensor.clone()), "
                    "or in forward()"
                )


def _all_kept(graph: Translated) -> list[tuple[int, tuple[Reference, ...]]]:
    """Nodes that apply a backward of the user's, with what it is given besides gradients."""
    return [
        (index, tuple(references_in(node.args[2])))
        for index, node in enumerate(graph.nodes)
        if node.operator == OWN_BACKWARD
    ]
