"""What optimizer and scheduler a Job takes, and what it says of others."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import p2ptrain
from p2ptrain.errors import OptionError, ScriptError
from p2ptrain.job.chosen_optimizer import optimizer_spec, optimizer_state
from p2ptrain.job.job import Job
from p2ptrain.job.update_numbers import KEPT
from p2ptrain.model.stage.optimizer import slots_of

DATA = [(torch.zeros(4), torch.zeros(1)) for _ in range(8)]
OTHER = nn.Linear(4, 1)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))


def job(
    make: Callable[[nn.Module], Any], scheduler: Callable[[Any], Any] = lambda _: None, **more: Any
) -> Job:
    module = model()
    optimizer = make(module)
    settings = {"batch_size": 4, "scheduler": scheduler(optimizer), **more}
    return Job(module, DATA, nn.functional.mse_loss, optimizer, **settings)


class Mine(torch.optim.SGD):
    """Of a user's own."""


class Lion(torch.optim.Optimizer):
    """Of a library."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})


def hooked(module: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(module.parameters())
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


def patched(module: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(module.parameters())
    optimizer.step = lambda closure=None: None  # type: ignore[assignment, method-assign]
    return optimizer


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda m: torch.optim.LBFGS(m.parameters()), "LBFGS: it computes the loss several times"),
        (lambda m: torch.optim.SparseAdam(m.parameters()), "SparseAdam: .* use torch.optim.Adam"),
        (lambda m: Mine(m.parameters()), r"\.Mine, .* none of torch.*nearest .* torch.optim.SGD"),
        (lambda m: Lion(m.parameters()), r"\.Lion, .* The nearest that works is torch.optim.AdamW"),
        (
            lambda m: [torch.optim.SGD(m.parameters())] * 2,
            "a list of 2, and a job has one. Give it",
        ),
        (lambda _: torch.optim.SGD, "not the class SGD: call it with the model's parameters"),
        (lambda _: 0.1, "must be a torch.optim object over the model's parameters, .* not builtin"),
        (
            lambda _: torch.optim.SGD(OTHER.parameters()),
            r"group 0: parameter 0 of shape \(1, 4\) is none of the model's",
        ),
        (
            lambda m: torch.optim.SGD(copy.deepcopy(m).parameters()),
            "Make the optimizer from model.parameters",
        ),
        (
            lambda m: torch.optim.Adam(m.parameters(), lr=torch.tensor(0.1)),
            r"group 0: lr is a tensor: give a number, lr=float",
        ),
        (lambda m: torch.optim.Adam(m.parameters(), capturable=True), "capturable=True is for"),
        (lambda m: torch.optim.SGD(m.parameters(), differentiable=True), "differentiable=True is"),
        (
            lambda m: torch.optim.SGD([{"params": m[0].parameters()}], lr=1e40),
            "group 0: lr must be a finite number",
        ),
        (hooked, "has hooks on its step"),
        (patched, r"step\(\) was replaced"),
        (
            lambda m: torch.optim.SGD(m[0].requires_grad_(False).parameters()),
            "nothing would be trained",
        ),
        (lambda _: p2ptrain.Muon(), r"Muon is for all parameters .*torch.optim.Muon\(...\) over"),
    ],
)
def test_what_devices_cannot_do_is_refused_with_what_works(
    make: Callable[[nn.Module], Any], words: str
) -> None:
    with pytest.raises(OptionError, match=words):
        job(make)


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("make", "schedule", "more", "words"),
    [
        (
            sgd,
            lambda _: lr_scheduler.StepLR(torch.optim.SGD(OTHER.parameters()), 1),
            {},
            "the scheduler is of another optimizer",
        ),
        (
            lambda _: p2ptrain.SGD(),
            lambda _: lr_scheduler.StepLR(torch.optim.SGD(OTHER.parameters()), 1),
            {},
            "give the torch.optim object that it was made with as `optimizer`, not p2ptrain.SGD",
        ),
        (sgd, lambda _: lambda update: 1.0, {}, "a function of the update is `schedule`"),
        (
            sgd,
            lambda o: lr_scheduler.StepLR(o, 1),
            {"schedule": lambda update: 1.0},
            "give `schedule` or `scheduler`, not both",
        ),
        (sgd, lr_scheduler.ReduceLROnPlateau, {}, "give eval_data too"),
        (
            sgd,
            lr_scheduler.ReduceLROnPlateau,
            {"eval_data": DATA, "scheduler_metric": "f1"},
            "scheduler_metric='f1' is none of the metrics: loss",
        ),
        (sgd, lambda _: None, {"scheduler_interval": "step"}, "must be 'update' or 'epoch'"),
    ],
)
def test_schedulers_that_cannot_be_stepped_are_refused(
    make: Callable[[nn.Module], Any],
    schedule: Callable[[Any], Any],
    more: dict[str, Any],
    words: str,
) -> None:
    with pytest.raises(OptionError, match=words):
        job(make, schedule, **more)


def test_groups_travel_by_number() -> None:
    made = job(lambda m: torch.optim.SGD([{"params": m[1].parameters(), "lr": 0.2}, *biases(m)]))
    names = ["0.weight", "0.bias", "1.weight", "1.bias"]
    trained = [name for name in names if name != "0.weight"]
    spec = optimizer_spec(made.model, made.optimizer, made.numbers.groups, trained)
    assert spec.group_of(trained) == {"0.bias": 1, "1.weight": 0, "1.bias": 0}
    assert [spec.group(number)["lr"] for number in (0, 1)] == [0.2, 0.3]


def biases(module: Any) -> list[dict[str, Any]]:
    return [{"params": [module[0].bias], "lr": 0.3}]


def test_rates_are_the_schedulers_whatever_is_asked_for_first() -> None:
    """Also those that are not kept any more: it starts again, and gives the same."""
    wanted, plain = [], sgd(model())
    theirs = lr_scheduler.ExponentialLR(plain, 0.999)
    plain.step()  # before which torch warns
    for _ in range(2 * KEPT):
        wanted.append(plain.param_groups[0]["lr"])
        theirs.step()
    numbers = job(sgd, lambda o: lr_scheduler.ExponentialLR(o, 0.999)).numbers
    for update in (5, 3, 2 * KEPT - 1, 0, KEPT, 7):
        assert numbers.rates(numbers.changes(update, 0)) == (wanted[update],)


def test_epochs_and_evaluations_step_it_too() -> None:
    by_epoch = job(sgd, lambda o: lr_scheduler.StepLR(o, 1), scheduler_interval="epoch").numbers
    assert [by_epoch.rates(by_epoch.changes(u, e))[0] for u, e in ((0, 0), (7, 1))] == [
        0.1,
        0.1 * 0.1,
    ]
    plateau = job(sgd, lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0), eval_data=DATA)
    numbers = plateau.numbers
    for updates, loss in ((2, 1.0), (4, 2.0), (4, 0.0), (6, float("nan"))):
        numbers.note(updates, loss)
    assert [numbers.rates(numbers.changes(u, 0))[0] for u in (3, 4, 5)] == [
        0.1,
        0.1 * 0.1,
        0.1 * 0.1,
    ]
    assert numbers.rates(numbers.changes(6, 0))[0] == pytest.approx(0.001)
    numbers.begin(numbers.measured[:1])
    assert numbers.rates(numbers.changes(6, 0)) == (0.1,)


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (lambda call: 1 / (1 - call), r"scheduler.step\(\) number 1 failed: ZeroDivisionError"),
        (lambda call: float("nan") if call else 1.0, "lr must be a finite number"),
        (lambda call: torch.tensor(0.5) if call else 1.0, "that is no number"),
    ],
)
def test_a_scheduler_that_fails_is_a_script_error(factor: Callable[[int], Any], words: str) -> None:
    numbers = job(sgd, lambda o: lr_scheduler.LambdaLR(o, factor)).numbers
    with pytest.raises(ScriptError, match=words):
        numbers.changes(1, 0)


def test_momentum_may_move_and_not_begin() -> None:
    def with_momentum(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)

    def cycle(optimizer: Any) -> Any:
        return lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)

    moving = job(with_momentum, cycle).numbers
    assert moving.changes(3, 0).keys() == {"lr", "momentum"}
    without = job(sgd, lambda o: Begins(o)).numbers
    with pytest.raises(ScriptError, match="changes the momentum from 0"):
        without.changes(1, 0)


class Begins(lr_scheduler.LRScheduler):
    """Writes a momentum where there was none."""

    def get_lr(self) -> Any:
        for group in self.optimizer.param_groups if self.last_epoch else ():
            group["momentum"] = 0.9
        return [group["lr"] for group in self.optimizer.param_groups]


def layouts(made: Job) -> dict[str, Any]:
    named = dict(made.model.named_parameters())
    spec = optimizer_spec(made.model, made.optimizer, made.numbers.groups, list(named))
    return {name: slots_of(spec, 0, parameter) for name, parameter in named.items()}


def stepped(module: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return optimizer


def test_a_loss_with_parameters_of_its_own_belongs_into_the_model() -> None:
    class Margin(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.centers = nn.Parameter(torch.zeros(4))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return (output - self.centers - target).square().mean()

    model, loss = nn.Linear(4, 4), Margin()
    both = torch.optim.SGD([*model.parameters(), *loss.parameters()])
    with pytest.raises(
        OptionError, match=r"centers is the loss's own.* put the loss into the model"
    ):
        Job(model=model, data=[(torch.ones(4), 0.0)], loss=loss, optimizer=both, batch_size=1)


def test_state_of_training_before_is_copied() -> None:
    made = job(stepped)
    found = optimizer_state(made.model, made.optimizer, layouts(made))
    assert len(found) == 4 * 3
    theirs: dict[Any, dict[str, Tensor]] = made.optimizer.state  # type: ignore[union-attr]
    for name, parameter in made.model.named_parameters():
        for slot, value in theirs[parameter].items():
            assert torch.equal(found[f"{name}.{slot}"], value)
            assert found[f"{name}.{slot}"].data_ptr() != value.data_ptr()


def test_state_that_is_not_torchs_is_refused() -> None:
    made = job(stepped)
    theirs: Any = made.optimizer
    theirs.state[next(made.model.parameters())]["exp_avg"] = torch.zeros(7)
    with pytest.raises(OptionError, match=r"'0.weight' cannot be taken over: its 'exp_avg'"):
        optimizer_state(made.model, made.optimizer, layouts(made))


def test_state_of_before_the_first_update_is_none() -> None:
    made = job(lambda m: torch.optim.Adagrad(m.parameters()))
    assert optimizer_state(made.model, made.optimizer, layouts(made)) == {}
