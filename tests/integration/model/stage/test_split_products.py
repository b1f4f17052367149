"""A backward in two parts keeps what its second part needs, and no more of the graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

from p2ptrain.errors import InternalError
from p2ptrain.model.stage.split_backward import WeightGradients, accumulate, compute_together
from p2ptrain.model.stage.stage import Stage
from tests.support import stage_pipeline
from tests.support.prepared_models import Get, Prepared
from tests.support.stage_pipeline import assert_same


def test_dropout_draws_the_same_masks(prepared: Get) -> None:
    case = prepared("dropout")
    boundaries = (0, 1, case.units)
    whole = stage_pipeline.pipeline_step(case.made, case.model, boundaries)
    assert_same(whole, stage_pipeline.pipeline_step(case.made, case.model, boundaries, split=True))


class _Last:
    """All units but the first, with the micro-batches of a step."""

    def __init__(self, case: Prepared) -> None:
        description, state = case.model.description, case.model.state()
        first = Stage(description, 0, 1, state)
        self.stage = Stage(description, 1, case.units, state)
        self.samples = [
            (
                first.forward(key, leaves, targets),
                targets,
            )
            for key, (leaves, targets) in enumerate(
                (case.model.entering(x, "train"), case.model.targets((x, y)))
                for x, y, _ in stage_pipeline.micro_batches(case.made)
            )
        ]

    def forward(self, key: int, *, split: bool = True) -> None:
        inputs, targets = self.samples[key]
        self.stage.forward(key, inputs, targets, split=split)

    def gradients(self) -> dict[str, Tensor | None]:
        """As they are now."""
        return {
            name: None if parameter.grad is None else parameter.grad.clone()
            for name, parameter in self.stage.parameters().items()
        }


@pytest.mark.parametrize("name", ["cnn", "gpt", "folded_batch"])
def test_products_wait_for_the_second_part(prepared: Get, name: str) -> None:
    last = _Last(prepared(name))
    last.forward(0)
    last.stage.backward_inputs(0)
    before = last.gradients()
    products = {n for n, p in last.stage.parameters().items() if p.dim() > 1 and p.requires_grad}
    assert all(before[n] is None for n in products)
    last.stage.backward_weights(0)
    assert all(gradient is not None for n, gradient in last.gradients().items() if n in products)


@pytest.mark.parametrize("keys", [[(0, 1, 2)], [(0,), (1, 2)], [(0,), (1,), (2,)]])
def test_a_gradient_said_to_be_final_is(prepared: Get, keys: list[tuple[int, ...]]) -> None:
    last = _Last(prepared("cnn"))
    for key in range(3):
        last.forward(key)
        last.stage.backward_inputs(key)
    seen: list[str] = []
    snapshots: dict[str, Tensor | None] = {}

    def final(name: str) -> None:
        seen.append(name)
        snapshots[name] = last.gradients()[name]

    for group in keys[:-1]:
        last.stage.backward_weights(*group)
    last.stage.backward_weights(*keys[-1], final=final)
    assert sorted(seen) == sorted(last.stage.parameters())
    for name, gradient in last.gradients().items():
        snapshot = snapshots[name]
        assert gradient is not None
        assert snapshot is not None
        assert torch.equal(snapshot, gradient)
    matrices = [n for n in seen if last.stage.parameters()[n].dim() > 1]
    assert matrices == [n for n in reversed([*last.stage.parameters()]) if n in matrices]


def test_the_graph_is_freed_but_for_what_products_multiplied(prepared: Get) -> None:
    last = _Last(prepared("cnn"))
    kept: dict[int, StorageWeakRef] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept.setdefault(storage.data_ptr(), StorageWeakRef(storage))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        last.forward(0)
    inputs, targets = last.samples[0]
    lasting = [*last.stage.state().values(), *inputs, *targets]
    own = {tensor.untyped_storage().data_ptr() for tensor in lasting}
    ours = [reference for key, reference in kept.items() if key not in own]
    alive = [reference for reference in ours if not reference.expired()]
    last.stage.backward_inputs(0)
    waiting = [reference for reference in ours if not reference.expired()]
    products = sum(p.dim() > 1 for p in last.stage.parameters().values())
    assert 0 < len(waiting) <= products < len(alive)
    last.stage.backward_weights(0)
    assert all(reference.expired() for reference in ours)


def test_a_whole_backward_after_a_watched_forward_is_a_whole_one(prepared: Get) -> None:
    last, plain = _Last(prepared("cnn")), _Last(prepared("cnn"))
    last.forward(0)
    plain.forward(0, split=False)
    for one, other in zip(last.stage.backward(0), plain.stage.backward(0), strict=True):
        assert one is other is None or torch.equal(one, other)  # type: ignore[arg-type]
    theirs = plain.gradients()
    for name, gradient in last.gradients().items():
        assert torch.equal(gradient, theirs[name])  # type: ignore[arg-type]
    assert last.stage.held() == 0


def test_a_gradient_that_does_not_come_back_is_nothing(prepared: Get) -> None:
    case = prepared("mlp")
    x, _, _ = stage_pipeline.micro_batches(case.made)[0]
    stage = Stage(case.model.description, 0, 1, case.model.state())
    stage.forward(0, [x], [], split=True)
    assert stage.backward_inputs(0, [None]) == [None]
    stage.backward_weights(0)
    assert all(parameter.grad is None for parameter in stage.parameters().values())


def test_parts_come_once_each_and_in_order(prepared: Get) -> None:
    last = _Last(prepared("mlp"))
    last.forward(0)
    with pytest.raises(InternalError, match="nothing is left"):
        last.stage.backward_weights(0)
    last.stage.backward_inputs(0)
    assert last.stage.held() == 1
    with pytest.raises(InternalError, match="not forwarded"):
        last.stage.backward_inputs(0)
    with pytest.raises(InternalError, match="already"):
        last.forward(0)
    last.stage.backward_weights(0)
    with pytest.raises(InternalError, match="nothing is left"):
        last.stage.backward_weights(0)
    last.forward(0, split=False)
    with pytest.raises(InternalError, match="not forwarded"):
        last.stage.backward_inputs(0)
    last.stage.forget_held()
    assert last.stage.held() == 0


def test_a_product_counts_once_however_often_its_node_is_met() -> None:
    """Two uses of a filter, one of them of what takes no gradient, and a sum behind the other."""
    torch.manual_seed(1)
    image = torch.randn(1, 2, 5, 5, dtype=torch.float64)
    weight = nn.Parameter(torch.randn(2, 2, 3, 3, dtype=torch.float64))
    later = WeightGradients({id(weight): 2})
    first = functional.conv2d(image, weight, padding=1)
    second = functional.conv2d(first.relu(), weight, padding=1)
    for result in (first, second, second + image):
        later.watch(result)
    later.settle()
    assert not later.parameters


def test_a_gradient_that_was_added_is_freed_before_the_next_one() -> None:
    """Of several micro-batches the first one's is taken over, and no other stays for long."""
    linear = nn.Linear(4, 3, bias=False)
    parts = [WeightGradients({id(linear.weight): 1}) for _ in range(3)]
    for part in parts:
        inputs = torch.randn(2, 4, requires_grad=True)
        result = linear(inputs)
        part.watch(result)
        part.settle()
        result.sum().backward(inputs=[inputs])
    given: list[StorageWeakRef] = []
    still_there: list[int] = []

    def add(parameter: nn.Parameter, gradient: Tensor | None) -> None:
        assert gradient is not None
        still_there.append(sum(not one.expired() for one in given[1:]))
        given.append(StorageWeakRef(gradient.untyped_storage()))
        accumulate(parameter, gradient)

    assert [*compute_together(parts, add)] == [linear.weight]
    assert still_there == [0, 0, 0]
