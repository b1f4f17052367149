"""From an exported program to our own graph.

Three things become simpler on the way. Regions under `torch.no_grad()` (and under a disabled
autocast, which do nothing) are flattened into one list of nodes. Whole numbers that follow from the
batch size become polynomials, so no node ever needs the target only to ask for its length. Nodes
that nothing uses and that only check something are dropped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torch.export.graph_signature import InputKind, OutputKind

from p2ptrain.errors import CaptureError
from p2ptrain.model.capture.export_errors import control_flow_hint, is_own
from p2ptrain.model.capture.scored_module import Example, VaryingSize
from p2ptrain.model.capture.translated import (
    ARRIVING,
    BatchSymbol,
    Traced,
    Translated,
    backward_graph,
)
from p2ptrain.model.graph import operators
from p2ptrain.model.graph.checked_operators import EXPECT, UNLIKE
from p2ptrain.model.graph.custom_operators import OWN_BACKWARD
from p2ptrain.model.graph.effects import draws_random_numbers, mutated_references
from p2ptrain.model.graph.nodes import (
    Argument,
    GraphNode,
    InputRef,
    NodeRef,
    Reference,
    StateRef,
    TargetRef,
)
from p2ptrain.model.graph.values import Polynomial
from p2ptrain.model.tracing import autograd_functions
from p2ptrain.model.tracing.autograd_graph import storages, written_storages
from p2ptrain.model.tracing.function_modes import aten_name

StateNames: TypeAlias = Callable[[str, Tensor, bool], str]
"""(name in the exported program, tensor, whether it is written to) -> canonical name."""

_CHECKS = re.compile(r"aten\.(_assert|sym_constrain|_functional_assert|_functional_sym)")

_CALL_NUMBER = re.compile(r"@\d+")


def translate(
    program: torch.export.ExportedProgram, example: Example, state_names: StateNames
) -> Translated:
    """Translate one mode.

    Args:
        program: of `ScoredModule`: first the model's input leaves, then the target's.
        example: what it was exported with.
        state_names: names for the tensors it takes besides.

    Raises:
        CaptureError: it applies an operator that may not travel.
    """
    leaves = len(example.input_leaves)
    bindings: list[Argument] = []
    fakes: list[Tensor] = []
    state: dict[Reference, Tensor] = {}
    placeholders = program.graph.find_nodes(op="placeholder")
    modules = program.graph_module.modules()
    written = written_storages(m.graph for m in modules if isinstance(m, fx.GraphModule))
    for spec, placeholder in zip(program.graph_signature.input_specs, placeholders, strict=True):
        if spec.kind is InputKind.USER_INPUT:
            index = len(fakes)
            fakes.append(placeholder.meta["val"])
            bindings.append(InputRef(index) if index < leaves else TargetRef(index - leaves))
        elif isinstance(program.constants.get(str(spec.target)), torch.Generator):
            bindings.append(None)  # devices draw from theirs
        else:
            fake = placeholder.meta["val"]
            reference = StateRef(
                _state_name(program, spec, state_names, not written.isdisjoint(storages(fake)))
            )
            bindings.append(reference)
            state[reference] = fake
    known: dict[Reference, Tensor] = state | {
        TargetRef(index): fake for index, fake in enumerate(fakes[leaves:])
    }
    last = program.graph.output_node()
    returned = frozenset(
        binding
        for placeholder, binding in zip(placeholders, bindings, strict=True)
        if isinstance(binding, StateRef) and last in placeholder.users
    )
    varying = [[fakes[leaf].shape[d] for leaf, d in size.places] for size in example.varying]
    batch = BatchSymbol(fakes[0].shape[0], varying, example.lengths)
    for size, found in zip(example.varying, varying, strict=True):
        if any(map(batch.is_fixed, found)):
            raise CaptureError(one_length_only(size))
    walk = _Walk(batch, known, returned)
    results = walk.run(program.graph_module, bindings, grad_enabled=True)
    _check_outputs(program)
    outputs = walk.as_outputs(results)
    graph = Translated(
        tuple(walk.nodes),
        tuple(walk.traced),
        tuple(fakes[:leaves]),
        tuple(fakes[leaves:]),
        outputs,
        state,
        walk.batch,
    )
    return graph.arranged(_used(graph, walk.moved))


def one_length_only(size: VaryingSize) -> str:
    """The message about a model that takes batches of one length."""
    seen = ", ".join(map(str, sorted(set(size.seen))))
    return (
        f"{size.name} differs from batch to batch ({seen}), and the model can be captured for one "
        "size only: pad it to one size (in the loader's collate_fn), or use x.shape or -1 where "
        "the size is written as a number"
    )


def _state_name(
    program: torch.export.ExportedProgram, spec: Any, state_names: StateNames, written: bool
) -> str:
    if spec.kind not in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
        raise CaptureError(
            f"the model holds something that is no tensor and no module: {spec.kind}"
        )
    target = str(spec.target)
    holder = program.state_dict if target in program.state_dict else program.constants
    tensor = holder[target]
    if not isinstance(tensor, Tensor):
        raise CaptureError(f"the model holds {target!r}, a {type(tensor).__name__}, not a tensor")
    return state_names(target, tensor, written)


def _check_outputs(program: torch.export.ExportedProgram) -> None:
    kinds = {spec.kind for spec in program.graph_signature.output_specs}
    if kinds != {OutputKind.USER_OUTPUT}:
        raise CaptureError(f"the model writes to its inputs in a way that cannot travel: {kinds}")


class _Walk:
    """Translates graph modules, one inside the other, into one list of nodes."""

    def __init__(
        self,
        batch: BatchSymbol,
        known: Mapping[Reference, Tensor],
        returned: frozenset[StateRef],
    ) -> None:
        """What tracing knows of state and targets; which state the graph returns as it is."""
        self.nodes: list[GraphNode] = []
        self.traced: list[Traced] = []
        self.batch = batch
        self.moved: set[int] = set()
        """Nodes of which others have been made that count."""
        self._names: set[str] = set()
        self._known = known
        self._returned = returned
        self._given: dict[Reference, NodeRef] = {}

    def run(
        self, module: fx.GraphModule, bindings: Sequence[Argument], *, grad_enabled: bool
    ) -> Any:
        """Translate `module` with its placeholders bound; returns what it gives."""
        values: dict[fx.Node, Any] = {}
        unbound = iter(bindings)
        for node in module.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(unbound)
            elif node.op == "get_attr":
                values[node] = getattr(module, node.target)
            elif node.op == "call_function":
                values[node] = self._call(node, values, grad_enabled)
            elif node.op == "output":
                return fx.map_arg(node.args[0], values.__getitem__)
        raise CaptureError("the exported graph has no output")

    def as_outputs(self, results: Iterable[Any]) -> tuple[InputRef | NodeRef, ...]:
        """The graph's results; a parameter or target among them gets a node of its own."""
        outputs: list[InputRef | NodeRef] = []
        for result in results:
            if isinstance(result, StateRef | TargetRef):
                result = self._give(result)
            if isinstance(result, InputRef | NodeRef):
                outputs.append(result)
            else:
                raise CaptureError(f"the model's output holds {result!r}, which is no tensor")
        return tuple(outputs)

    def _give(self, result: StateRef | TargetRef) -> NodeRef:
        """A node for a result that no node makes."""
        if result not in self._given:
            made = self._append("output", "aten.alias.default", (result,), (), True)
            self.traced.append(Traced(self._known[result], ""))
            self._given[result] = made
        return self._given[result]

    def _call(self, node: fx.Node, values: Mapping[fx.Node, Any], grad_enabled: bool) -> Any:
        args: Any = fx.map_arg(node.args, values.__getitem__)
        kwargs: Any = fx.map_arg(node.kwargs, values.__getitem__)
        target = node.target
        if target is torch.ops.higher_order.wrap_with_set_grad_enabled:
            return self.run(args[1], args[2:], grad_enabled=grad_enabled and args[0])
        if target is torch.ops.higher_order.wrap_with_autocast:
            return self._autocast(args, grad_enabled)
        if target is autograd_functions.ARRIVING:
            return self._add(node, ARRIVING, args, (), grad_enabled)
        if target is autograd_functions.JOINED:
            return self._own_backward(node, args)
        name = aten_name(operators.name_of(target))
        if name is not None and _CHECKS.match(name) and not _is_expected(args):
            return None
        if name == "operator.getitem" and isinstance(args[0], tuple | list):
            return args[0][args[1]]
        value = node.meta.get("val")
        if isinstance(value, int | torch.SymInt):
            number = self.batch.polynomial(value)
            if number is not None:
                return number
        return self._node(node, name, args, kwargs, grad_enabled)

    def _autocast(self, args: Sequence[Any], grad_enabled: bool) -> Any:
        """(device, dtype, enabled, cache, module, *its arguments)."""
        if args[2] and args[0] == "cpu":  # its casts are traced: see `vmap_autocast`
            raise CaptureError(
                "the model enables torch.autocast in a way that cannot be traced. Use "
                "`with torch.autocast(...)`, or convert explicitly with .to(dtype)"
            )
        return self.run(args[4], args[5:], grad_enabled=grad_enabled)

    def _node(
        self, node: fx.Node, name: str | None, args: Any, kwargs: Any, grad_enabled: bool
    ) -> NodeRef:
        if name is None or not operators.is_allowed(name):
            called = name or _called(node.target)
            hint = control_flow_hint(called)
            raise CaptureError(
                f"the model uses {called}, which p2ptrain does not carry to other devices"
                f"{_where(node)}{f'. {hint}' if hint else ''}"
            )
        arguments = tuple(_argument(argument) for argument in _dense(name, args))
        named = tuple(
            (key, _argument(argument)) for key, argument in kwargs.items() if key != "generator"
        )
        reference = self._add(node, name, arguments, named, grad_enabled)
        for used in self.nodes[reference.index].references():
            if isinstance(used, StateRef) and used in self._returned:
                self._give(used)  # beside its first use: at the end it would keep all in one unit
        return reference

    def _own_backward(self, node: fx.Node, args: Sequence[Any]) -> NodeRef:
        """A node for a function with its own backward, whose nodes are the last ones."""
        outputs, inputs, arriving, gradients = args
        (first,) = self.nodes[arriving[0].index].references()
        assert isinstance(first, NodeRef)
        name = str(self.nodes[first.index].args[1])
        graph, kept = backward_graph(name, self.nodes, first.index, arriving, gradients)
        self.moved.update(range(first.index, len(self.nodes)))
        arguments = (tuple(outputs), tuple(inputs), kept, graph)
        return self._add(node, OWN_BACKWARD, arguments, (), True)

    def _add(
        self,
        node: fx.Node,
        operator: str,
        args: tuple[Argument, ...],
        kwargs: tuple[tuple[str, Argument], ...],
        grad_enabled: bool,
    ) -> NodeRef:
        reference = self._append(node.name, operator, args, kwargs, grad_enabled)
        self.traced.append(Traced(node.meta.get("val"), module_path(node)))
        return reference

    def _append(
        self,
        name: str,
        operator: str,
        args: tuple[Argument, ...],
        kwargs: tuple[tuple[str, Argument], ...],
        grad_enabled: bool,
    ) -> NodeRef:
        unique, attempt = name, 1
        while unique in self._names:
            unique, attempt = f"{name}_r{attempt}", attempt + 1
        self._names.add(unique)
        self.nodes.append(GraphNode(unique, operator, args, kwargs, grad_enabled))
        return NodeRef(len(self.nodes) - 1)


def _is_expected(args: Sequence[Any]) -> bool:
    """Of a check: whether it is one of `ValueDecisions`, and not torch's own of a trace."""
    return len(args) == len(("condition", "text")) and str(args[1]).startswith(UNLIKE)


def _called(target: Any) -> str:
    """A name, for messages, of a function that is no operator."""
    if str(getattr(target, "__module__", "")).startswith("torch._functorch"):
        return "torch.vmap or another transform of torch.func"
    return str(target)


def module_path(node: fx.Node) -> str:
    """Dotted path, in the user's model, of the innermost module that `node` ran in."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [str(entry[0]) for entry in stack.values()]
    innermost = _CALL_NUMBER.sub("", paths[-1]) if paths else ""
    first, _, rest = innermost.partition(".")
    return rest if first == "module" else ""


def _dense(name: str, args: Sequence[Any]) -> Sequence[Any]:
    """With dense gradients of embeddings: the same updates, and they can be sent and added up."""
    if name not in ("aten.embedding.default", "aten.embedding_bag.padding_idx"):
        return args
    schema = operators.resolve(name).schema_arguments
    return [False if key == "sparse" else arg for key, arg in zip(schema, args, strict=False)]


def _argument(value: Any) -> Argument:
    if isinstance(value, list | tuple):
        return tuple(_argument(item) for item in value)
    if isinstance(value, torch.device) and value.type != "cpu":
        raise CaptureError(f"the model creates tensors on {value}; capture it on the CPU")
    if isinstance(value, _ARGUMENT_TYPES) or value is None:
        return value
    raise CaptureError(f"the model passes {value!r} to an operator, which cannot travel")


_ARGUMENT_TYPES = (
    InputRef,
    TargetRef,
    StateRef,
    NodeRef,
    Polynomial,
    bool,
    int,
    float,
    complex,
    str,
    torch.dtype,
    torch.memory_format,
    torch.layout,
    torch.device,
)


def _where(node: fx.Node) -> str:
    """The innermost line of the user's that a node's stack trace names; else a library's."""
    lines = [line.strip() for line in str(node.meta.get("stack_trace") or "").splitlines()]
    files = [line for line in lines if line.startswith("File ") and not line.startswith('File "<')]
    own = [line for line in files if is_own(line.split('"')[1])]
    return f" ({(own or files)[-1]})" if files else ""


def _used(graph: Translated, moved: Collection[int]) -> list[int]:
    """Without nodes that nothing uses, unless they write to something or draw random numbers.

    Those of `moved` do so elsewhere.
    """
    needed = {output.index for output in graph.outputs if isinstance(output, NodeRef)}
    for index in range(len(graph.nodes) - 1, -1, -1):
        node = graph.nodes[index]
        acts = index not in moved and (
            mutated_references(node) or draws_random_numbers(node) or node.operator == EXPECT
        )
        if index in needed or acts:
            if node.operator == ARRIVING:
                raise CaptureError(
                    f"what {node.args[1]}.backward computes is used outside of it; return it"
                )
            needed.add(index)
            needed.update(r.index for r in node.references() if isinstance(r, NodeRef))
    return sorted(needed)
