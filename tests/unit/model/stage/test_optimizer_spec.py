from __future__ import annotations

import inspect
from typing import Any

import cbor2
import pytest
import torch

import p2ptrain
from p2ptrain.errors import OptionError, ProtocolError
from p2ptrain.model.stage.optimizer_spec import (
    SGD,
    Adam,
    AdamW,
    OptimizerSpec,
    optimizer_from_fields,
)

SPECS: list[OptimizerSpec] = [
    SGD(),
    SGD(0.1, momentum=0.9, nesterov=True),
    SGD(lr=1, weight_decay=1e-4, dampening=0.5, momentum=0.5, foreach=True),
    Adam(),
    Adam(2e-3, (0.8, 0.95), amsgrad=True),
    AdamW(weight_decay=0.1, maximize=True, fused=False),
]


@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_fields_survive_cbor(spec: OptimizerSpec) -> None:
    assert optimizer_from_fields(cbor2.loads(cbor2.dumps(spec.to_fields()))) == spec


@pytest.mark.parametrize("cls", [SGD, Adam, AdamW])
def test_defaults_and_positions_are_torchs(cls: type[SGD]) -> None:
    theirs = inspect.signature(cls.torch_class.__init__).parameters
    ours = inspect.signature(cls).parameters
    for name, parameter in ours.items():
        assert parameter.default == theirs[name].default, name
        assert parameter.kind == theirs[name].kind, name
    left_out = set(theirs) - set(ours) - {"self", "params"}
    assert left_out <= {"differentiable", "capturable"}
    positional = [n for n, p in theirs.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [n for n in positional if n in ours] == positional[2:]


@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_build_gives_torch_the_arguments(spec: OptimizerSpec) -> None:
    optimizer = spec.build([torch.nn.Parameter(torch.zeros(2))])
    assert type(optimizer) is spec.torch_class
    for name, value in spec.arguments().items():
        assert optimizer.defaults[name] == value


@pytest.mark.parametrize(
    ("cls", "arguments", "told"),
    [
        (SGD, {"lr": -1.0}, "Invalid learning rate"),
        (SGD, {"lr": float("nan")}, "lr must be a finite number"),
        (SGD, {"lr": float("inf")}, "lr must be a finite number"),
        (SGD, {"lr": 1e200}, "lr must be a finite number, 1e\\+30 at most, not 1e\\+200"),
        (SGD, {"dampening": -1e200}, "dampening must be a finite number, 1e\\+30 at most"),
        (SGD, {"lr": "fast"}, "lr must be a finite number, .* not 'fast'"),
        (SGD, {"lr": True}, "lr must be a finite number"),
        (SGD, {"lr": torch.tensor(0.1)}, "lr must be a finite number"),
        (SGD, {"nesterov": True}, "Nesterov"),
        (SGD, {"nesterov": 1}, "nesterov must be a bool"),
        (SGD, {"foreach": True, "fused": True}, "fused"),
        (Adam, {"betas": (1.5, 0.9)}, "beta"),
        (Adam, {"betas": 0.9}, "betas must be two finite numbers"),
        (Adam, {"betas": (0.9,)}, "betas must be two finite numbers"),
        (AdamW, {"eps": -1e-8}, "epsilon"),
    ],
)
def test_refuses_what_torch_refuses(
    cls: type[SGD], arguments: dict[str, object], told: str
) -> None:
    with pytest.raises(OptionError, match=told) as caught:
        cls(**arguments)  # type: ignore[arg-type]
    assert f"p2ptrain.{cls.__name__}" in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"name": "Lion", "lr": 0.1},
        {"name": ["SGD"]},
        {**SGD().to_fields(), "extra": 1},
        {"name": "SGD", "lr": 0.1},
        {**SGD().to_fields(), "lr": -1.0},
        {**Adam().to_fields(), "betas": "ab"},
        {**SGD().to_fields(), "lr": 10**5000},
        {**SGD().to_fields(), "nesterov": 10**5000},
        {**Adam().to_fields(), "betas": [10**5000, 0]},
        {"name": 10**5000},
    ],
)
def test_a_peers_nonsense_is_a_protocol_error(fields: dict[str, object]) -> None:
    with pytest.raises(ProtocolError):
        optimizer_from_fields(fields)


@pytest.mark.parametrize(
    "given",
    [
        [{"params": [], "lr": 0.1}],
        [torch.nn.Parameter(torch.zeros(1))],
        torch.nn.Linear(2, 2).parameters(),
        {"params": []},
    ],
)
def test_parameters_are_refused_with_what_to_do(given: Any) -> None:
    wrong: Any = SGD
    with pytest.raises(OptionError, match=r"SGD takes no parameters .*Leave out the first"):
        wrong(given, lr=0.1)
    with pytest.raises(OptionError, match="takes no parameters"):
        wrong(given)
    with pytest.raises(OptionError, match="takes no parameters"):
        wrong(params=given, lr=0.1)


@pytest.mark.parametrize("lr", [torch.tensor(0.1), "fast"])
def test_a_wrong_learning_rate_is_not_taken_for_parameters(lr: Any) -> None:
    with pytest.raises(OptionError, match="lr must be a finite number"):
        SGD(lr)


@pytest.mark.parametrize("name", ["RMSprop", "Adagrad", "LBFGS"])
def test_optimizers_that_are_not_there_are_named_with_those_that_are(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"no optimizer {name}: use p2ptrain\.SGD"):
        getattr(p2ptrain, name)


def test_all_of_torchs_other_optimizers_are_known() -> None:
    theirs = {name for name in dir(torch.optim) if name[0].isupper()} - {"Optimizer"}
    for name in theirs - {"SGD", "Adam", "AdamW"}:
        with pytest.raises(AttributeError, match="has no optimizer"):
            getattr(p2ptrain, name)
