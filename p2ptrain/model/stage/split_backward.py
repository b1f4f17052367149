"""The gradients of the weights, computed later than those of the inputs.

A pipeline is shorter when a stage sends the gradients of its inputs at once and fills its waiting
time with the gradients of its weights (Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section
2). Autograd computes both in one pass; here it is asked, in one pass as ever, only for what leads
to the inputs, and each product with a weight keeps the two factors of its weight gradient:

    forward   x --[product with w]-- y      x is remembered: autograd keeps it anyway
    inputs    gx <-- w -- gy                autograd; gy is remembered as it comes by, the rest of
                                            the graph is freed
    weights   gw = gy * x                   with the very operators that autograd would have called

What is split are convolutions and matrix products whose weight is a parameter itself. All else that
takes gradients (norms, embeddings, weights computed from others) is done with the inputs: little of
it, or inseparable. The forward's graph is not changed, so that both ways give the same bits; sums
over several uses of a weight are made in autograd's order, the last use first.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

Pairs: TypeAlias = list[tuple[nn.Parameter, Tensor]]

Add: TypeAlias = Callable[[nn.Parameter, Tensor | None], None]
"""Takes the gradient of one micro-batch; None where none came."""


class _Product(Protocol):
    """How one product makes its parameters' gradients; `inputs` is what it multiplies."""

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """Those that take gradients."""

    def gradients(self, output_gradient: Tensor) -> Pairs:
        """Of each of `parameters`, in the order in which autograd hands them on."""


@dataclass(eq=False, slots=True)
class _PendingProduct:
    """A product between its forward and its weight gradient.

    Attributes:
        product: what makes the gradients.
        hook: on the product's node, for `capture`.
        output_gradient: None until the inputs' part, or where no gradient came.
    """

    product: _Product
    hook: RemovableHandle | None = None
    output_gradient: Tensor | None = None

    def capture(self, gradients: tuple[Tensor | None, ...]) -> None:
        """Called by autograd before it runs the product's node."""
        self.output_gradient = gradients[0]


class WeightGradients:
    """The weight gradients of one micro-batch: watched in the forward, computed after the inputs'.

    Attributes:
        parameters: those that `compute` adds to, by id; known after `settle`.
    """

    def __init__(self, uses: Mapping[int, int]) -> None:
        """Start with nothing.

        Args:
            uses: id of each trainable parameter -> how many nodes of the stage read it.
        """
        self._uses = uses
        self._waiting: list[_PendingProduct] = []
        self._watched: set[Node] = set()  # until it is settled: nodes keep the forward's graph
        self.parameters: frozenset[int] = frozenset()

    def watch(self, result: Tensor) -> None:
        """Note what a product with a parameter has just given, if it can be split.

        A product is noted once: what is added to it afterwards leads to the same node.
        """
        node = _product_node(result.grad_fn)
        if node in self._watched:
            return
        product = None if node is None else _PRODUCTS[node.name()](node)
        if node is None or product is None or not self._owns(product.parameters):
            return
        if not self._leads_on(node.next_functions[_INPUTS[node.name()]][0]):
            return
        waiting = _PendingProduct(product)
        waiting.hook = node.register_prehook(waiting.capture)
        self._waiting.append(waiting)
        self._watched.add(node)

    def settle(self) -> None:
        """After the forward: a parameter with any use that cannot be split is split nowhere."""
        self._watched.clear()
        while True:
            found = Counter(id(p) for waiting in self._waiting for p in waiting.product.parameters)
            split = {key for key, count in found.items() if count == self._uses[key]}
            kept = [w for w in self._waiting if split.issuperset(map(id, w.product.parameters))]
            if len(kept) == len(self._waiting):
                break
            _remove_hooks(w for w in self._waiting if w not in kept)
            self._waiting = kept
        self.parameters = frozenset(split)

    def cancel(self) -> None:
        """Nothing is to be computed later: the whole backward runs instead."""
        _remove_hooks(self._waiting)
        self._waiting.clear()
        self._watched.clear()

    def compute(self, add: Add) -> Iterator[list[nn.Parameter]]:
        """One product after the other, the last first: give its parameters' gradients to `add`.

        Yields after each product the parameters that are done. What a product has kept is freed as
        soon as its gradients are there.
        """
        left = Counter(id(p) for waiting in self._waiting for p in waiting.product.parameters)
        sums: dict[int, Tensor] = {}
        while self._waiting:
            yield self._compute_last(add, left, sums)

    def _compute_last(
        self, add: Add, left: Counter[int], sums: dict[int, Tensor]
    ) -> list[nn.Parameter]:
        """Of the last product; `left` and `sums`: uses to come and what others gave, by id."""
        done = []
        for parameter, gradient in _gradients(self._waiting.pop()):
            key = id(parameter)
            if gradient is not None:
                sums[key] = sums[key] + gradient if key in sums else gradient
            left[key] -= 1
            if not left[key]:
                add(parameter, sums.pop(key, None))
                done.append(parameter)
        return done

    def order(self) -> tuple[int, ...]:
        """Ids of the products' parameters, in the forward's order."""
        return tuple(id(p) for waiting in self._waiting for p in waiting.product.parameters)

    def _leads_on(self, start: Node | None) -> bool:
        """Whether gradients that `start` gets reach a node that uses them.

        Those for a view that was made in `torch.no_grad()` do not, though it requires them.
        """
        seen: set[Node] = set()
        left = [start]
        while left:
            node = left.pop()
            if node is None or node in seen:
                continue
            if node.name() == _TAKES or node in self._watched:
                return True
            seen.add(node)
            left += [edge for edge, _ in node.next_functions]
        return False

    def _owns(self, parameters: Iterable[nn.Parameter]) -> bool:
        return all(id(parameter) in self._uses for parameter in parameters)


class NoGradients(WeightGradients):
    """Zeros for these parameters: of a micro-batch that counts nothing."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__({})
        self._zeros = list(parameters)
        self.parameters = frozenset(map(id, parameters))

    def compute(self, add: Add) -> Iterator[list[nn.Parameter]]:
        """Give `add` the zeros, all in one go."""
        for parameter in self._zeros:
            add(parameter, torch.zeros_like(parameter))
        yield self._zeros

    def order(self) -> tuple[int, ...]:
        """Unlike that of any micro-batch that counts."""
        return (0, *map(id, self._zeros))


def compute_together(parts: Sequence[WeightGradients], add: Add) -> Iterator[nn.Parameter]:
    """The weight gradients of several micro-batches, product by product, the last product first.

    So those of the last units are final early, and can travel while the first units' are computed.
    Each parameter's are added in the order of `parts`. Yields each parameter when all are in.
    """
    if len({part.order() for part in parts}) > 1:  # a batch of one may be computed another way
        for part in parts[:-1]:
            deque(part.compute(add), maxlen=0)
        parts = parts[-1:]
    for done in zip(*(part.compute(add) for part in parts), strict=True):
        yield from done[-1]


def _gradients(waiting: _PendingProduct) -> Iterable[tuple[nn.Parameter, Tensor | None]]:
    if waiting.output_gradient is None:
        return [(parameter, None) for parameter in waiting.product.parameters]
    return list(waiting.product.gradients(waiting.output_gradient))


def _remove_hooks(waiting: Iterable[_PendingProduct]) -> None:
    for each in waiting:
        if each.hook is not None:
            each.hook.remove()


def accumulate(parameter: nn.Parameter, gradient: Tensor | None) -> None:
    """As autograd's AccumulateGrad: the first one is taken over, in the parameter's layout."""
    if gradient is None:
        return
    if parameter.grad is not None:
        parameter.grad.add_(gradient)
    elif gradient.stride() == parameter.stride():
        parameter.grad = gradient
    else:
        parameter.grad = torch.empty_like(parameter).copy_(gradient)


@dataclass(frozen=True, eq=False, slots=True)
class _MatrixProduct:
    """`inputs @ weight`, or with the weight transposed; a bias is added to every row.

    Attributes:
        inputs: (rows, inner).
        transposed: the parameter is (columns, inner), as in `linear`, else (inner, columns).
    """

    inputs: Tensor
    weight: nn.Parameter
    bias: nn.Parameter | None
    transposed: bool

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        return (self.weight,) if self.bias is None else (self.bias, self.weight)

    def gradients(self, output_gradient: Tensor) -> Pairs:
        found: Pairs = []
        if self.bias is not None:
            found.append((self.bias, output_gradient.sum_to_size(self.bias.shape)))
        found.append((self.weight, self._weight_gradient(output_gradient)))
        return found

    def _weight_gradient(self, output_gradient: Tensor) -> Tensor:
        """Autograd chooses between two products by the factor's layout; they differ in bits."""
        factor = self.weight.t() if self.transposed else self.weight  # (inner, columns)
        if factor.stride() == (1, factor.size(0)):
            gradient = output_gradient.t().mm(self.inputs).t()
        else:
            gradient = self.inputs.t().mm(output_gradient)
        return gradient.t() if self.transposed else gradient


@dataclass(frozen=True, eq=False, slots=True)
class _Convolution:
    """Any convolution, transposed ones too; `arguments` are those of ATen's backward."""

    inputs: Tensor
    weight: nn.Parameter
    bias: nn.Parameter | None
    arguments: tuple[object, ...]

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def gradients(self, output_gradient: Tensor) -> Pairs:
        _, weight, bias = _CONVOLUTION_BACKWARD(
            output_gradient,
            self.inputs,
            self.weight,
            *self.arguments,
            (False, True, self.bias is not None),
        )
        found: Pairs = [(self.weight, weight)]
        if self.bias is not None:
            found.append((self.bias, bias))
        return found


_CONVOLUTION_BACKWARD = torch.ops.aten.convolution_backward.default._op


def _product_node(node: Node | None) -> Node | None:
    """The product among the few nodes that an operator such as `linear` leaves in the graph."""
    while node is not None:
        name = node.name()
        if name in _PRODUCTS:
            return node
        if name not in _AROUND_PRODUCTS:
            return None
        node = node.next_functions[0][0]
    return None


def _addmm(node: Node) -> _Product | None:
    if (node._saved_alpha, node._saved_beta) != (1, 1):  # type: ignore[attr-defined]
        return None
    bias, inputs, weight = (edge for edge, _ in node.next_functions)
    return _matrix_product(node, "_saved_mat1", inputs, weight, _parameter(bias))


def _mm(node: Node) -> _Product | None:
    inputs, weight = (edge for edge, _ in node.next_functions)
    return _matrix_product(node, "_saved_self", inputs, weight, None)


def _matrix_product(
    node: Node, saved: str, inputs: Node | None, weight: Node | None, bias: nn.Parameter | None
) -> _Product | None:
    """None where nothing flows to the inputs: then there is no first part to be had."""
    if inputs is None or weight is None:
        return None
    transposed = weight.name() == "TBackward0"
    parameter = _parameter(weight.next_functions[0][0] if transposed else weight)
    if parameter is None or parameter.is_complex():
        return None
    return _MatrixProduct(getattr(node, saved).detach(), parameter, bias, transposed)


def _convolution(node: Node) -> _Product | None:
    inputs, weight, bias = (edge for edge, _ in node.next_functions)
    parameter = _parameter(weight)
    if inputs is None or parameter is None:
        return None
    return _Convolution(
        node._saved_input.detach(),  # type: ignore[attr-defined]
        parameter,
        _parameter(bias),
        tuple(getattr(node, name) for name in _CONVOLUTION_ARGUMENTS),
    )


def _parameter(node: Node | None) -> nn.Parameter | None:
    """The parameter in which an edge ends, if it ends there."""
    variable = getattr(node, "variable", None)
    return variable if isinstance(variable, nn.Parameter) else None


_CONVOLUTION_ARGUMENTS = (
    "_saved_bias_sym_sizes_opt",
    "_saved_stride",
    "_saved_padding",
    "_saved_dilation",
    "_saved_transposed",
    "_saved_output_padding",
    "_saved_groups",
)

_PRODUCTS: Mapping[str, Callable[[Node], _Product | None]] = {
    "AddmmBackward0": _addmm,
    "MmBackward0": _mm,
    "ConvolutionBackward0": _convolution,
}

_INPUTS = {"AddmmBackward0": 1, "MmBackward0": 0, "ConvolutionBackward0": 0}
"""Which of a product's arguments is what it multiplies with the parameter."""

_TAKES = "torch::autograd::AccumulateGrad"

_AROUND_PRODUCTS = frozenset({"ViewBackward0", "UnsafeViewBackward0", "AddBackward0"})
"""What `linear` puts behind its product: rows unfolded again, at times the bias."""
