from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from p2ptrain.errors import InternalError
from p2ptrain.model.stage.optimizer import (
    StageOptimizer,
    optimizer_state_ratio,
    slots_of,
    state_layout,
)
from p2ptrain.model.stage.optimizer_form import OptimizerSpec, PlainColumns
from p2ptrain.model.stage.optimizer_spec import (
    ASGD,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Muon,
    NAdam,
    RAdam,
    RMSprop,
    Rprop,
    over,
)
from tests.support import zoo

torch.set_num_threads(1)

SPECS: list[OptimizerSpec] = [
    SGD(0.1),
    SGD(0.1, momentum=0.9),
    SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    SGD(0.1, momentum=0.5, foreach=True, maximize=True),
    Adam(0.01),
    Adam(0.01, (0.8, 0.99), amsgrad=True, fused=True),
    AdamW(0.01, weight_decay=0.1),
    AdamW(0.01, amsgrad=True, foreach=True),
    NAdam(0.01, weight_decay=0.1),
    RAdam(0.01),
    Adamax(0.01),
    Adadelta(1.0),
    Adagrad(0.1, initial_accumulator_value=0.5),
    RMSprop(0.01, momentum=0.9, centered=True),
    Rprop(0.01),
    ASGD(0.1, t0=2.0),
    Adafactor(0.1),
]
STEPS = 6

RATE = 0.05


def factor(update: int) -> float:
    return 0.7 ** (update // 2)


def changes(update: int) -> PlainColumns:
    return {"lr": (RATE * factor(update),)}


def model() -> nn.Module:
    """Four layers; the second is frozen, the third's bias never gets a gradient."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        layers = nn.Sequential(*[nn.Linear(5, 5) for _ in range(4)])
    layers[1].requires_grad_(False)
    return layers.to(torch.float32)


def give_gradients(named: dict[str, nn.Parameter], step: int) -> None:
    for name, parameter in named.items():
        if parameter.requires_grad and name != "2.bias":
            generator = torch.Generator().manual_seed(step * 100 + len(name) + ord(name[0]))
            parameter.grad = torch.randn(parameter.shape, generator=generator)


def plain(spec: OptimizerSpec, steps: int = STEPS) -> dict[str, Tensor]:
    """One torch optimizer over everything, with LambdaLR."""
    whole = model()
    optimizer = spec.torch_class(whole.parameters(), **{**spec.group(0), "lr": RATE})
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    for step in range(steps):
        give_gradients(dict(whole.named_parameters()), step)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return whole.state_dict()


def stages(spec: OptimizerSpec, whole: nn.Module, cut: int) -> list[StageOptimizer]:
    named = list(whole.named_parameters())
    return [StageOptimizer(spec, named[:cut]), StageOptimizer(spec, dict(named[cut:]))]


def run(whole: nn.Module, parts: list[StageOptimizer], steps: range) -> None:
    for step in steps:
        give_gradients(dict(whole.named_parameters()), step)
        for part in parts:
            part.step(changes(step))
            part.zero_grad()


def assert_equal(whole: nn.Module, expected: dict[str, Tensor]) -> None:
    assert all(torch.equal(tensor, expected[name]) for name, tensor in whole.state_dict().items())


@pytest.mark.parametrize("spec", SPECS, ids=repr)
@pytest.mark.parametrize("cut", [0, 3, 5])
def test_parts_do_what_one_optimizer_does(spec: OptimizerSpec, cut: int) -> None:
    whole = model()
    run(whole, stages(spec, whole, cut), range(STEPS))
    assert_equal(whole, plain(spec))
    assert not torch.equal(whole.state_dict()["0.weight"], model().state_dict()["0.weight"])
    assert torch.equal(whole.state_dict()["1.weight"], model().state_dict()["1.weight"])


@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_state_moves_to_stages_that_are_cut_elsewhere(spec: OptimizerSpec) -> None:
    whole = model()
    first = stages(spec, whole, 2)
    run(whole, first, range(3))
    moved = {name: t.clone() for part in first for name, t in part.state().items()}
    second = stages(spec, whole, 5)
    for part in second:
        layout = state_layout(spec, part.parameters)
        part.load_state({name: moved[name] for name in layout if name in moved})
    run(whole, second, range(3, STEPS))
    assert_equal(whole, plain(spec))


@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_loading_an_older_state_rolls_back(spec: OptimizerSpec) -> None:
    whole = model()
    parts = stages(spec, whole, 3)
    run(whole, parts, range(2))
    kept_state = [{k: v.clone() for k, v in part.state().items()} for part in parts]
    kept_weights = {k: v.clone() for k, v in whole.state_dict().items()}
    run(whole, parts, range(2, 5))
    whole.load_state_dict(kept_weights)
    for part, state in zip(parts, kept_state, strict=True):
        part.load_state(state)
    run(whole, parts, range(2, STEPS))
    assert_equal(whole, plain(spec))


def test_loading_an_empty_state_starts_over() -> None:
    whole = model()
    parts = stages(Adam(0.01), whole, 3)
    run(whole, parts, range(2))
    whole.load_state_dict(model().state_dict())
    for part in parts:
        part.load_state({})
        assert part.state() == {}
    run(whole, parts, range(STEPS))
    assert_equal(whole, plain(Adam(0.01)))


def test_loaded_state_is_a_copy() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = StageOptimizer(SGD(0.1, momentum=0.9), {"w": parameter})
    mine = torch.ones(2)
    optimizer.load_state({"w.momentum_buffer": mine})
    parameter.grad = torch.ones(2)
    optimizer.step()
    assert torch.equal(mine, torch.ones(2))


@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_state_is_what_the_layout_says(spec: OptimizerSpec) -> None:
    whole = model()
    (part,) = stages(spec, whole, 0)[1:]
    run(whole, [part], range(1))
    layout = state_layout(spec, part.parameters)
    state = part.state()
    assert {k: (t.dtype, tuple(t.shape)) for k, t in state.items()}.items() <= layout.items()
    assert {name for name in layout if name not in state} == {
        f"2.bias.{slot}" for slot in slots_of(spec, 0, torch.empty(5))
    } - state.keys()


def test_state_of_a_parameter_without_dimensions_keeps_its_type() -> None:
    parameter = nn.Parameter(torch.ones((), dtype=torch.float64))
    optimizer = StageOptimizer(SGD(lr=0.1, momentum=0.9), {"scale": parameter})
    parameter.grad = torch.full((), 1 / 3, dtype=torch.float64)
    optimizer.step()
    assert torch.equal(optimizer.state()["scale.momentum_buffer"], parameter.grad)
    optimizer.load_state(optimizer.state())


def test_counters_are_float32_wherever_they_were_counted() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        parameter = nn.Parameter(torch.ones(2))
        optimizer = StageOptimizer(Adam(), {"w": parameter})
        parameter.grad = torch.ones(2)
        optimizer.step()
        assert optimizer.state()["w.step"].dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("spec", "ratio"),
    [
        (SGD(), 0.0),
        (SGD(momentum=0.9), 1.0),
        (Adam(), 2.0),
        (Adam(amsgrad=True), 3.0),
        (AdamW(), 2.0),
        (Rprop(), 2.0),
        (Adagrad(), 1.0),
        (RMSprop(centered=True, momentum=0.5), 3.0),
    ],
)
def test_optimizer_state_ratio(spec: OptimizerSpec, ratio: float) -> None:
    assert optimizer_state_ratio(spec, mlp()) == ratio


def mlp() -> dict[str, nn.Parameter]:
    return dict(zoo.make("mlp").model.named_parameters())


def test_the_ratio_counts_rows_and_columns() -> None:
    parameters = mlp()
    optimizer = torch.optim.Adafactor(parameters.values())
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    kept = sum(
        tensor.nbytes
        for slots in optimizer.state.values()
        for tensor in slots.values()
        if tensor.dim()
    )
    whole = sum(parameter.nbytes for parameter in parameters.values())
    assert optimizer_state_ratio(Adafactor(), parameters) == kept / whole < 0.5


def test_groups_may_keep_different_things() -> None:
    trained = [*mlp()]
    one, other = SGD(0.1, momentum=0.9).group(0), SGD(0.1).group(0)
    members = [int("weight" in name) for name in trained]
    layout = state_layout(
        spec := OptimizerSpec.of("SGD", [other, one], members),
        {name: torch.empty(1) for name in trained},
        spec.group_of(trained),
    )
    assert layout.keys() == {f"{n}.momentum_buffer" for n in trained if "weight" in n}


@pytest.mark.parametrize("spec", SPECS, ids=repr)
@pytest.mark.parametrize("cut", [0, 3])
def test_groups_in_parts_do_what_torchs_groups_do(spec: OptimizerSpec, cut: int) -> None:
    """Both groups lie in both parts; one is scheduled, and updated piece by piece."""
    whole, theirs = model(), model()
    slow = {**spec.group(0), "lr": 0.001}
    group_of = {name: int(name.endswith("bias")) for name, _ in theirs.named_parameters()}
    both = OptimizerSpec.of(spec.name, [spec.group(0), slow], [*group_of.values()])
    assert both.group_of([*group_of]) == group_of
    parts = [[p for n, p in theirs.named_parameters() if group_of[n] == g] for g in (0, 1)]
    optimizer = over(spec, [(spec.group(0), parts[0]), (slow, parts[1])])
    named = list(whole.named_parameters())
    ours = [StageOptimizer(both, dict(part), group_of) for part in (named[:cut], named[cut:])]
    for step in range(STEPS):
        rates = (RATE * factor(step), 0.002)
        for each in (whole, theirs):
            give_gradients(dict(each.named_parameters()), step)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        for part in ours:
            names = list(part.parameters)
            part.step({"lr": rates}, names[:2])
            part.step({"lr": rates}, names[2:])
            part.zero_grad()
    assert_equal(whole, theirs.state_dict())


def test_muon_trains_matrices() -> None:
    weights = [nn.Parameter(torch.eye(4, 3)) for _ in range(2)]
    theirs = torch.optim.Muon([weights[0]], lr=0.1)
    ours = StageOptimizer(Muon(lr=0.1), {"w": weights[1]})
    for step in range(3):
        for weight in weights:
            weight.grad = torch.arange(12.0).reshape(4, 3) + step
        theirs.step()
        ours.step()
    assert torch.equal(*weights)
    assert ours.state()["w.momentum_buffer"].shape == (4, 3)


def test_a_stage_without_trainable_parameters_has_nothing_to_do() -> None:
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer = StageOptimizer(Adam(), {"w": frozen})
    optimizer.step({"lr": (0.5,)})
    optimizer.zero_grad()
    optimizer.load_state({})
    assert optimizer.state() == {}
    assert optimizer.gradients() == {}


GOOD: dict[str, Callable[[], Tensor]] = {
    "w.exp_avg": lambda: torch.zeros(2),
    "w.exp_avg_sq": lambda: torch.zeros(2),
    "w.step": lambda: torch.tensor(1.0),
}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"v.step": torch.tensor(1.0)}, "'v.step' does not belong"),
        ({"w.exp_avg": torch.zeros(3)}, "'w.exp_avg' does not belong"),
        ({"w.exp_avg": torch.zeros(2).double()}, "'w.exp_avg' does not belong"),
        ({"w.step": None}, "'w' is incomplete"),
    ],
)
def test_foreign_or_partial_state_is_refused(changes: dict[str, Tensor | None], told: str) -> None:
    optimizer = StageOptimizer(Adam(), {"w": nn.Parameter(torch.ones(2))})
    state = {**{name: make() for name, make in GOOD.items()}, **changes}
    with pytest.raises(InternalError, match=told):
        optimizer.load_state({k: v for k, v in state.items() if v is not None})
    assert optimizer.state() == {}
