"""From the user's module and loss to a description that can travel to other devices.

export (twice) -> translate -> possible cuts -> units -> description
"""

from __future__ import annotations

import linecache
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.graph_module import _loader

from p2ptrain.errors import CaptureError, ScriptError
from p2ptrain.model.capture.aliases import traced_aliases
from p2ptrain.model.capture.captured import Captured, SampleLimits, StateTable
from p2ptrain.model.capture.cuts import GraphCuts, Matched, match_cuts, possible_cuts
from p2ptrain.model.capture.export import Exported, export
from p2ptrain.model.capture.export_errors import LossRefuses
from p2ptrain.model.capture.loss_leaves import with_loss_leaves
from p2ptrain.model.capture.min_batch import min_batch, refuses_one_sample
from p2ptrain.model.capture.scored_module import (
    Example,
    Loss,
    ScoredModule,
    VaryingSize,
    structure_of,
)
from p2ptrain.model.capture.translate import translate
from p2ptrain.model.capture.translated import Translated
from p2ptrain.model.capture.units import Landscape, choose_cuts, heavy_nodes, node_flops, unit_names
from p2ptrain.model.graph.description import (
    ModelDescription,
    UnitDescription,
    crossing_at,
    last_uses,
)
from p2ptrain.model.graph.nodes import (
    Graph,
    NodeRef,
    StateRef,
)
from p2ptrain.model.graph.values import BATCH, Polynomial, ValueDescription, length
from p2ptrain.model.tracing.trace_patches import one_at_a_time
from p2ptrain.model.tracing.untraced_changes import refuse_unready

_FLOPS_BATCH = 16


def capture(
    module: nn.Module,
    loss: Loss,
    example: tuple[Any, Any],
    *,
    evaluation: bool = True,
    autocast: torch.dtype | None = None,
    varying: tuple[VaryingSize, ...] = (),
) -> Captured:
    """Export `module` and `loss` together, in train and in evaluation mode, and cut them to units.

    Args:
        module: unmodified; left as it was.
        loss: (output, target) -> a tensor with one number, the mean over the samples.
        example: (input, target), a batch of at least two samples, batch in dimension 0.
        evaluation: False spares the second export; the evaluation graph is then the training
            graph and must not be run. Where the loss does not take what the model returns in
            evaluation mode, a zero stands for it (`Captured.unscored`).
        autocast: the type under which `torch.autocast` calls both; None: neither is.
        varying: sizes that differ from batch to batch; the example's is one of them.

    Raises:
        CaptureError: torch.export cannot take it; names the user's line and what to change.
        ScriptError: the example is unusable.
    """
    with one_at_a_time, _given_back():
        taken = replace(_take_apart(example), varying=varying)
        scored = ScoredModule(module, loss, taken, autocast)
        return _capture(scored, taken, evaluation=evaluation)


def _capture(scored: ScoredModule, taken: Example, *, evaluation: bool) -> Captured:
    module = scored.module
    refuse_unready(module)
    table = StateTable(module)
    exported = export(scored, taken, training=True)
    train = evaluate = _translate(exported, taken, table)
    trains = evaluates = _limits(exported, train)
    unscored = ""
    if evaluation:
        with _blaming_evaluation():
            exported, unscored = _export_evaluation(scored, taken)
            evaluate = _translate(exported, taken, table)
        evaluates = _limits(exported, evaluate)
    table.refuse_shared_memory()
    train, evaluate, targets = with_loss_leaves(train, evaluate, table.trainable_names())
    description = _describe(type(module).__name__, taken, table, train, evaluate, targets)
    return Captured(
        *(description, taken, targets, exported.output, table, trains, evaluates),
        unscored=unscored,
        autocast=scored.autocast,
    )


@contextmanager
def _given_back() -> Iterator[None]:
    """What torch keeps of every export for as long as the process runs.

    Its caches are the process's own. And a shape environment and its fake tensors hold each other
    through C++, where no collector looks.
    """
    made: list[ShapeEnv] = []
    begin, here, known = ShapeEnv.__init__, threading.get_ident(), set(_loader.eval_cache)

    def noted(environment: ShapeEnv, *args: Any, **kwargs: Any) -> None:
        if threading.get_ident() == here:
            made.append(environment)
        begin(environment, *args, **kwargs)

    ShapeEnv.__init__ = noted  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        ShapeEnv.__init__ = begin  # type: ignore[method-assign]
        for environment in made:
            environment.tracked_fakes = []
        for cached in vars(ShapeEnv).values():
            if hasattr(cached, "cache_clear"):
                cached.cache_clear()
        FakeTensorMode.cache_clear()
        for source in set(_loader.eval_cache) - known:
            del _loader.eval_cache[source]
            linecache.cache.pop(source, None)


def _limits(exported: Exported, graph: Translated) -> SampleLimits:
    one = refuses_one_sample(graph)
    known = graph.batch.least(exported.program)
    least = max(known, 2 if one else 1, min_batch(graph))
    most = graph.batch.most(exported.program)
    return SampleLimits(one, known, least, most, graph.batch.guards)


def _export_evaluation(scored: ScoredModule, example: Example) -> tuple[Exported, str]:
    """The second export, and why it is without the loss, where it is; "" where it has it."""
    try:
        return export(scored, example, training=False), ""
    except LossRefuses as error:
        scored.is_scored = False
        return export(scored, example, training=False), str(error)


@contextmanager
def _blaming_evaluation() -> Iterator[None]:
    """Say of what fails that it is not the training: that was captured before."""
    try:
        yield
    except CaptureError as error:
        raise CaptureError(f"in evaluation mode, for eval_data: {error}") from error


def _take_apart(example: tuple[Any, Any]) -> Example:
    inputs, input_structure = structure_of(example[0], _keep_constant)
    targets, target_structure = structure_of(example[1], _keep_constant)
    sizes = {leaf.shape[0] if leaf.dim() else 0 for leaf in (*inputs, *targets)}
    if not inputs or len(sizes) != 1 or min(sizes) < 2:
        raise ScriptError(
            "a batch must consist of tensors with the samples in dimension 0, two or more of them "
            f"to capture the model; got sizes {sorted(sizes)}"
        )
    return Example(input_structure, target_structure, inputs, targets)


def _keep_constant(leaf: object) -> object:
    if leaf is None or isinstance(leaf, bool | int | float | str):
        return leaf
    raise ScriptError(f"samples must be made of tensors, but one holds a {type(leaf).__name__}")


def _translate(mode: Exported, example: Example, table: StateTable) -> Translated:
    return translate(mode.program, example, table.name_of)


def _describe(
    name: str,
    example: Example,
    table: StateTable,
    train: Translated,
    evaluate: Translated,
    straight: Sequence[int],
) -> ModelDescription:
    inputs = _leaves("input", example, range(len(example.input_leaves)))
    targets = _leaves("target", example, straight)
    trainable = table.trainable_names()
    aliases = traced_aliases(train)
    train_cuts = possible_cuts(train, aliases, inputs, targets, trainable)
    _refuse_without_gradient(train, train_cuts)
    evaluate_cuts = possible_cuts(evaluate, traced_aliases(evaluate), inputs, targets, frozenset())
    landscape = _landscape(train, train_cuts)
    written = {ref.name for ref in aliases.mutated() if isinstance(ref, StateRef)}
    matched = match_cuts(
        train,
        evaluate,
        choose_cuts(landscape),
        evaluate_cuts.widths,
        trainable | written,
    )
    with _blaming_evaluation():
        evaluated = _graph(evaluate, matched.evaluate, evaluate_cuts)
    return ModelDescription(
        name=name,
        inputs=inputs,
        targets=targets,
        tensors=table.describe(_state_used(train, evaluate)),
        tied=table.tied(),
        state_dict=table.state_dict_names(),
        train=_graph(train, matched.train, train_cuts),
        evaluate=evaluated,
        units=_units(landscape, matched, len(evaluate.nodes)),
        longest=tuple(max(size.seen) for size in example.varying),
    )


def _leaves(kind: str, example: Example, places: Sequence[int]) -> tuple[ValueDescription, ...]:
    """Of the leaves in these places, counted over inputs and targets."""
    leaves = [*example.input_leaves, *example.target_leaves]

    def described(index: int, place: int) -> ValueDescription:
        leaf, lengths = leaves[place], example.dynamic(place)
        sizes = (
            length(lengths[d]) if d in lengths else Polynomial((size,))
            for d, size in enumerate(leaf.shape[1:], 1)
        )
        return ValueDescription(f"{kind}_{index}", leaf.dtype, (BATCH, *sizes), False)

    return tuple(described(index, place) for index, place in enumerate(places))


def _refuse_without_gradient(train: Translated, cuts: GraphCuts) -> None:
    """Plain torch would refuse the backward. Raises CaptureError."""
    loss = train.outputs[0]
    value = cuts.values.get(loss.index) if isinstance(loss, NodeRef) else None
    if isinstance(loss, NodeRef) and (value is None or value.may_require_grad):
        return
    raise CaptureError(
        "the loss depends on no parameter that requires a gradient: is forward() or the loss under "
        "torch.no_grad(), or is what they compute detached?"
    )


def _landscape(graph: Translated, cuts: GraphCuts) -> Landscape:
    arguments = [[graph.value_of(argument) for argument in node.args] for node in graph.nodes]
    return Landscape(
        work=[
            node_flops(graph, given, index, _FLOPS_BATCH) / _FLOPS_BATCH
            for index, given in enumerate(arguments)
        ],
        heavy=heavy_nodes(graph),
        modules=[traced.module for traced in graph.traced],
        widths=cuts.widths,
    )


def _state_used(*graphs: Translated) -> frozenset[str]:
    return frozenset(
        reference.name
        for graph in graphs
        for node in graph.nodes
        for reference in node.references()
        if isinstance(reference, StateRef)
    )


def _graph(graph: Translated, positions: Sequence[int], cuts: GraphCuts) -> Graph:
    """The finished graph, with a description of every value that crosses a cut between units."""
    last = last_uses(graph.nodes, graph.outputs)
    bare = Graph(graph.nodes, graph.outputs, {})
    crossing = {v for position in positions for v in crossing_at(bare, position, last)}
    wanted = sorted({v.index for v in (*crossing, *graph.outputs) if isinstance(v, NodeRef)})
    missing = [index for index in wanted if index not in cuts.values]
    if missing:
        names = ", ".join(graph.nodes[index].name for index in missing[:4])
        raise CaptureError(
            f"the model's output has a shape that does not follow from the batch size ({names}), "
            "or is no plain tensor. Return tensors whose shapes do not depend on values"
        )
    return Graph(graph.nodes, graph.outputs, {index: cuts.values[index] for index in wanted})


def _units(
    landscape: Landscape, matched: Matched, evaluate_nodes: int
) -> tuple[UnitDescription, ...]:
    names = unit_names(matched.train, landscape)
    train = pairwise((0, *matched.train, len(landscape.work)))
    evaluate = pairwise((0, *matched.evaluate, evaluate_nodes))
    return tuple(
        UnitDescription(name, round(sum(landscape.work[slice(*nodes)])), nodes, others)
        for name, nodes, others in zip(names, train, evaluate, strict=True)
    )
