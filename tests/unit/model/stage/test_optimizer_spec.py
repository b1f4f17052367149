from __future__ import annotations

import inspect
from typing import Any

import cbor2
import pytest
import torch

import p2ptrain
from p2ptrain.errors import OptionError, ProtocolError
from p2ptrain.model.stage import optimizer_spec
from p2ptrain.model.stage.optimizer_form import OptimizerSpec
from p2ptrain.model.stage.optimizer_spec import (
    NAMES,
    SGD,
    Adam,
    AdamW,
    received,
)
from p2ptrain.net.forms import write_form
from p2ptrain.net.read_form import read_form

FORMS: list[Any] = [getattr(optimizer_spec, name) for name in NAMES]

SPECS: list[OptimizerSpec] = [
    SGD(),
    SGD(0.1, momentum=0.9, nesterov=True),
    SGD(lr=1, weight_decay=1e-4, dampening=0.5, momentum=0.5, foreach=True),
    Adam(),
    Adam(2e-3, (0.8, 0.95), amsgrad=True),
    AdamW(weight_decay=0.1, maximize=True, fused=False),
    *[form() for form in FORMS],
]


@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_it_survives_cbor(spec: OptimizerSpec) -> None:
    found = arrived(spec)
    assert (found.name, found.columns, found.count) == (spec.name, spec.columns, 1)


def arrived(spec: object) -> OptimizerSpec:
    """As a peer reads it."""
    fields = write_form(spec) if isinstance(spec, OptimizerSpec) else spec
    return received(read_form(OptimizerSpec, cbor2.loads(cbor2.dumps(fields)), "optimizer"))


def test_groups_survive_cbor() -> None:
    groups = [AdamW(lr=0.1).group(0), AdamW(lr=0.1, weight_decay=0.0, betas=(0.8, 0.9)).group(0)]
    spec = OptimizerSpec.of("AdamW", groups, [0, 1, 1])
    found = arrived(spec)
    assert found == spec
    assert [found.group(number) for number in (0, 1)] == groups
    assert found.group_of(["a", "b", "c"]) == {"a": 0, "b": 1, "c": 1}
    assert len(found.columns["lr"]) == 1, "what is the same in all groups travels once"


@pytest.mark.parametrize("members", [b"", b"\0", b"\0\0\1\0\1", b"\0\0\2\0", bytes(6)])
def test_groups_of_another_model_are_refused(members: bytes) -> None:
    several = {**SGD().columns, "lr": (0.1, 0.2)}
    with pytest.raises(ProtocolError, match="of another model"):
        arrived(OptimizerSpec("SGD", several, 2, members)).group_of(["a", "b"])


@pytest.mark.parametrize("cls", FORMS)
def test_defaults_and_positions_are_torchs(cls: Any) -> None:
    theirs = inspect.signature(getattr(torch.optim, cls.__name__).__init__).parameters
    ours = inspect.signature(cls).parameters
    for name, parameter in ours.items():
        assert parameter.default == theirs[name].default, name
        assert parameter.kind in (theirs[name].kind, parameter.KEYWORD_ONLY), name
    left_out = set(theirs) - set(ours) - {"self", "params"}
    assert left_out <= {"differentiable", "capturable"}
    positional = [n for n, p in ours.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == [*theirs][2 : 2 + len(positional)], (
        "what stands behind one left out has none"
    )


@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_build_gives_torch_the_arguments(spec: OptimizerSpec) -> None:
    optimizer = spec.build([torch.nn.Parameter(torch.zeros(2, 2))])
    assert type(optimizer) is spec.torch_class
    for name, value in spec.group(0).items():
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


def fields(spec: OptimizerSpec, **changes: object) -> dict[str, Any]:
    """What travels, with other columns."""
    plain = write_form(spec)
    return {**plain, "columns": {**plain["columns"], **changes}}


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"name": "Lion", "columns": {"lr": [0.1]}},
        {"name": "LBFGS", "columns": {"lr": [0.1]}},
        {"name": "Optimizer", "columns": {}},
        {"name": ["SGD"], "columns": {}},
        {"name": 10**5000, "columns": {}},
        {"name": "SGD", "columns": {"lr": [0.1]}},
        {"name": "SGD", "columns": [0.1]},
        {**write_form(SGD()), "count": 0},
        {**write_form(SGD()), "count": 10**6},
        fields(SGD(), extra=[1]),
        fields(SGD(), lr=[-1.0]),
        fields(SGD(), lr=[0.1, 0.2]),
        fields(SGD(), lr=[]),
        fields(SGD(), lr=0.1),
        fields(SGD(), lr=[float("nan")]),
        fields(SGD(), lr=[10**5000]),
        fields(SGD(), lr=[[0.1]]),
        fields(SGD(), lr=["0.1"]),
        fields(SGD(), lr=[{}]),
        fields(SGD(), lr=[[[[[0.1]]]]]),
        fields(SGD(), nesterov=[10**5000]),
        fields(Adam(), betas=["ab"]),
        fields(Adam(), betas=[[0.9] * 1000]),
        fields(Adam(), betas=[[10**5000, 0]]),
        fields(optimizer_spec.Muon(), ns_steps=[10**9]),
        fields(optimizer_spec.Muon(), ns_steps=[5.0]),
        fields(optimizer_spec.Muon(), adjust_lr_fn=["eval"]),
        fields(optimizer_spec.Adafactor(), eps=[[None, None]]),
    ],
)
def test_a_peers_nonsense_is_a_protocol_error(said: dict[str, object]) -> None:
    with pytest.raises(ProtocolError):
        arrived(said)


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


@pytest.mark.parametrize("name", ["LBFGS", "SparseAdam"])
def test_optimizers_that_are_not_there_are_named_with_those_that_are(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"no optimizer {name}: .*Adafactor"):
        getattr(p2ptrain, name)


def test_all_of_torchs_optimizers_are_known() -> None:
    theirs = {name for name in dir(torch.optim) if name[0].isupper()} - {"Optimizer"}
    assert theirs == {*NAMES, "LBFGS", "SparseAdam"}
    assert [getattr(p2ptrain, name).__name__ for name in NAMES] == [*NAMES]
