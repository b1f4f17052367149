"""What is captured is compared with the user's own module before anything is trained."""

from __future__ import annotations

import contextvars
import itertools
import os
import random
import sys
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn.functional import dropout, mse_loss
from torch.utils.checkpoint import checkpoint

from p2ptrain.errors import CaptureError
from p2ptrain.model.capture.capture import capture
from p2ptrain.model.capture.comparison import Comparison, compare
from p2ptrain.model.capture.kept_values import KeptValues, difference
from p2ptrain.model.capture.plain_run import ComparedBatches, run_plainly
from tests.support.compared import compared
from tests.support.odd_models import AfterLinear


class Scaled(nn.Module):
    """Scales by what `factor` gives at each call."""

    def __init__(self, factor: Callable[[Scaled], Any]) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.factor = [factor]

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = self.last(self.first(x).relu()) * self.factor[0](self)
        return scaled


def _batches(count: int = 3) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [
        (torch.randn(16, 6, generator=g), torch.randn(16, 3, generator=g)) for _ in range(count)
    ]


class Counted:
    calls: ClassVar[int] = 0
    weight: ClassVar[Tensor | None] = None


LIST: list[int] = []
DICT = {"n": 0}
CACHE: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
LOCAL = threading.local()
VARIABLE = contextvars.ContextVar("VARIABLE", default=0)

Factor = Callable[[Scaled], Any]


def _of_a_class(_: Scaled) -> int:
    Counted.calls += 1
    return Counted.calls


def _of_a_list(_: Scaled) -> int:
    LIST.append(1)
    return len(LIST)


def _of_a_dict(_: Scaled) -> int:
    DICT["n"] += 1
    return DICT["n"]


def _of_a_default(_: Scaled, counted: list[int] = [0]) -> int:  # noqa: B006
    counted[0] += 1
    return counted[0]


def _of_a_function(_: Scaled) -> int:
    _of_a_function.calls = getattr(_of_a_function, "calls", 0) + 1  # type: ignore[attr-defined]
    calls: int = _of_a_function.calls  # type: ignore[attr-defined]
    return calls


def _of_a_cache(model: Scaled) -> int:
    CACHE[model] = CACHE.get(model, 0) + 1
    return CACHE[model]


def _of_a_thread(_: Scaled) -> int:
    LOCAL.calls = getattr(LOCAL, "calls", 0) + 1
    calls: int = LOCAL.calls
    return calls


def _of_a_context(_: Scaled) -> int:
    VARIABLE.set(VARIABLE.get() + 1)
    return VARIABLE.get()


def _of_the_environment(_: Scaled) -> int:
    os.environ["CALLS"] = str(int(os.environ.get("CALLS", "0")) + 1)
    return int(os.environ["CALLS"])


def _closure() -> Factor:
    calls = 0

    def factor(_: Scaled) -> int:
        nonlocal calls
        calls += 1
        return calls

    return factor


def _numpy() -> Factor:
    number = numpy.zeros(1)

    def factor(_: Scaled) -> float:
        number[0] += 1
        return float(number[0])

    return factor


def _file() -> Factor:
    file = tempfile.TemporaryFile()  # noqa: SIM115

    def factor(_: Scaled) -> int:
        file.write(b".")
        return file.tell()

    return factor


def _iterated(numbers: Iterator[Any], last: Any = 0) -> Factor:
    return lambda _: 1 + next(numbers, last)


def _stale(model: Scaled) -> Tensor:
    """A copy of a weight that is made once."""
    if Counted.weight is None:
        Counted.weight = model.first.weight.detach().abs().mean()
    return Counted.weight


KINDS: dict[str, Callable[[], Factor]] = {
    "count": lambda: _iterated(itertools.count()),
    "every third": lambda: _iterated(itertools.cycle([0, 0, 1])),
    "the first call": lambda: _iterated(iter([1])),
    "the first three": lambda: _iterated(iter([1, 2, 3])),
    "class": lambda: _of_a_class,
    "the class's first calls": lambda: lambda model: 1 + (_of_a_class(model) > 2),
    "list": lambda: _of_a_list,
    "the list's first call": lambda: lambda model: 1 + (_of_a_list(model) > 1),
    "dict": lambda: _of_a_dict,
    "default": lambda: _of_a_default,
    "function": lambda: _of_a_function,
    "cache": lambda: _of_a_cache,
    "thread": lambda: _of_a_thread,
    "context": lambda: _of_a_context,
    "environment": lambda: _of_the_environment,
    "closure": _closure,
    "file": _file,
    "NumPy array": _numpy,
    "Python's random numbers": lambda: lambda _: random.random(),
    "NumPy's random numbers": lambda: lambda _: float(numpy.random.rand()),
    "the machine's": lambda: lambda _: os.urandom(1)[0],
    "time": lambda: lambda _: 1 + time.perf_counter_ns() % 1000,
    "a weight's copy": lambda: _stale,
    "a weight through NumPy": lambda: lambda m: float(abs(m.first.weight.detach().numpy()).mean()),
    "an eager tensor's type": lambda: lambda m: 1 + (type(m.first.weight) is nn.Parameter),
}


@pytest.fixture(autouse=True)
def _fresh() -> None:
    Counted.calls, Counted.weight, DICT["n"] = 0, None, 0
    LIST.clear()


@pytest.mark.parametrize("kind", KINDS)
def test_state_that_a_trace_does_not_see_is_refused(kind: str) -> None:
    with pytest.raises(CaptureError, match=r"module itself in plain torch: the \w+ of|NumPy"):
        compared(Scaled(KINDS[kind]()), mse_loss, _batches())


def test_what_can_be_put_back_is_as_it_was() -> None:
    for kind in ("class", "list", "dict", "default", "closure"):
        model = Scaled(KINDS[kind]())
        before = model.factor[0](model)
        with pytest.raises(CaptureError):
            compared(model, mse_loss, _batches())
        assert model.factor[0](model) == before + 1, kind


def test_the_layer_and_what_changes_are_named() -> None:
    class Counts(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x) * self.calls

    model = nn.Sequential(nn.Linear(6, 6), Counts(6, 3))
    with pytest.raises(CaptureError, match=r"layer '1' \(Counts\) gives.*change 1\.calls\. Some"):
        compared(model, mse_loss, _batches())


def test_in_evaluation_mode_too() -> None:
    class Evaluates(nn.Linear):
        numbers = itertools.count(1)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1 if self.training else next(self.numbers))

    assert compared(Evaluates(6, 3), mse_loss, _batches()) == Comparison(3)
    with pytest.raises(CaptureError, match="the loss in evaluation mode is"):
        compared(Evaluates(6, 3), mse_loss, _batches(), evaluates=True)


class _Freezes(nn.Module):
    """A critic that `freeze` is asked to freeze and to free, around its use."""

    def __init__(self, freeze: Callable[[nn.Linear, bool], object]) -> None:
        super().__init__()
        self.linear, self.critic = nn.Linear(6, 6), nn.Linear(6, 3)
        self.freeze = freeze

    def forward(self, x: Tensor) -> Tensor:
        self.freeze(self.critic, False)
        x = self.critic(self.linear(x))
        self.freeze(self.critic, True)
        return x


def _assigns(critic: nn.Linear, value: bool) -> None:
    critic.weight.requires_grad = value


@pytest.mark.parametrize(
    "freeze",
    [
        lambda critic, value: critic.requires_grad_(value),
        lambda critic, value: critic.weight.requires_grad_(requires_grad=value),
        _assigns,
    ],
)
def test_a_parameter_that_is_frozen_for_a_while_is_refused(
    freeze: Callable[[nn.Linear, bool], object],
) -> None:
    model = _Freezes(freeze)
    with pytest.raises(CaptureError, match=r"gradient of 'critic\.\w+' in batch 1 is not there"):
        compared(model, mse_loss, _batches())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_one_that_is_freed_is_taken() -> None:
    free = _Freezes(lambda critic, value: critic.requires_grad_(True))
    assert compared(free, mse_loss, _batches()) == Comparison(3)


def _scaled(x: Tensor) -> Tensor:
    x.register_hook(lambda gradient: gradient * 2)  # type: ignore[no-untyped-call]
    return x


def _read(x: Tensor) -> Tensor:
    x.register_hook(LIST.append)  # type: ignore[no-untyped-call]
    x.retain_grad()
    return x


def _scaled_by_a_node(x: Tensor) -> Tensor:
    made = torch.tanh(x)
    assert made.grad_fn is not None
    assert made.grad_fn.name() == "TanhBackward0"
    made.grad_fn.register_hook(lambda given, got: tuple(g * 2 for g in given))
    return made


def _packed(pack: Callable[[Tensor], Tensor], unpack: Callable[[Tensor], Tensor]) -> Any:
    def f(x: Tensor) -> Tensor:
        with saved_tensors_hooks(pack, unpack):
            return torch.tanh(x)

    return f


def _offloaded(x: Tensor) -> Tensor:
    with save_on_cpu():
        return torch.tanh(x)


def _hooked(kind: str, hook: Callable[..., Any]) -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    if kind == "accumulated":
        model[0].weight.register_post_accumulate_grad_hook(hook)  # type: ignore[operator]
    elif kind == "parameter":
        model[0].weight.register_hook(hook)  # type: ignore[operator]
    elif kind == "module":
        model[1].register_full_backward_hook(hook)
    elif kind == "before":
        model[0].register_full_backward_pre_hook(hook)
    return model


def _twice(*_: Any) -> tuple[Tensor, ...]:
    return tuple(gradient * 2 for gradient in _[-1])


def _doubled(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad * 2


HOOKED: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "activation": (lambda: AfterLinear(_scaled), False),
    "activation read": (lambda: AfterLinear(_read), True),
    "node": (lambda: AfterLinear(_scaled_by_a_node), False),
    "parameter": (lambda: _hooked("parameter", lambda gradient: gradient * 2), False),
    "parameter read": (lambda: _hooked("parameter", LIST.append), True),
    "module": (lambda: _hooked("module", lambda part, given, got: (given[0] * 2,)), False),
    "module read": (lambda: _hooked("module", lambda *got: LIST.append(1)), True),
    "before": (lambda: _hooked("before", _twice), False),
    "before read": (lambda: _hooked("before", lambda *got: LIST.append(1)), True),
    "accumulated": (lambda: _hooked("accumulated", _doubled), False),
    "accumulated read": (lambda: _hooked("accumulated", lambda p: LIST.append(1)), True),
    "packed": (lambda: AfterLinear(_packed(Tensor.half, Tensor.float)), False),
    "packed whole": (lambda: AfterLinear(_packed(Tensor.clone, Tensor.clone)), True),
    "offloaded": (lambda: AfterLinear(_offloaded), True),
}


@pytest.mark.parametrize("kind", HOOKED)
def test_hooks_that_change_gradients_are_refused_and_others_taken(kind: str) -> None:
    make, reads = HOOKED[kind]
    model = make()
    width = next(model.parameters()).shape[1]
    batches = [(torch.randn(16, width), torch.randn(16, width)) for _ in range(3)]
    if reads:
        assert compared(model, mse_loss, batches) == Comparison(3)
    else:
        with pytest.raises(CaptureError, match=r"the gradient of .* in batch 1 .* a backward hook"):
            compared(model, mse_loss, batches)


class Random(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.last, self.generator = nn.Linear(8, 3), torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        x = dropout(self.layers(x + torch.bernoulli(x.sigmoid(), generator=self.generator)), 0.1)
        out: Tensor = self.last(x)
        return out


def test_random_numbers_and_statistics_are_the_same_and_nothing_stays_changed() -> None:
    model = Random()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    marks = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    own = model.generator.get_state()
    assert compared(model, mse_loss, _batches()) == Comparison(3)
    for name, tensor in model.state_dict().items():
        assert torch.equal(before[name], tensor), name
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(marks[0], torch.get_rng_state())
    assert marks[1:] == (random.getstate(), numpy.random.get_state()[1].tolist())
    assert torch.equal(own, model.generator.get_state())


def test_two_batches_are_compared_however_long_they_take_and_no_more() -> None:
    clock = itertools.count(0.0, 5.0)
    batches = _batches()
    asked: list[int] = []

    def read(number: int, samples: int) -> tuple[Tensor, Tensor]:
        asked.append(samples)
        x, y = batches[number]
        return x[:samples], y[:samples]

    model = Scaled(lambda _: 2.0)
    run = run_plainly(
        *(model, mse_loss, read, None, range(3, 17)),
        ComparedBatches(),
        lambda: next(clock),
    )
    captured = capture(model, mse_loss, batches[0], evaluation=False)
    assert compare(model, captured, run) == Comparison(2)
    assert asked == [4, 3]


def test_a_model_that_takes_whole_batches_alone_is_given_them() -> None:
    def needs_many(x: Tensor) -> Tensor:
        if x.shape[0] < 16:
            raise ValueError("too few")
        return x

    model = AfterLinear(needs_many)
    batches = [(torch.randn(16, 8), torch.randn(16, 8)) for _ in range(2)]
    run = run_plainly(
        model, mse_loss, lambda k, n: (batches[k][0][:n], batches[k][1][:n]), None, range(1, 17),
        ComparedBatches(least=2, most=2),
    )  # fmt: skip
    assert [step.samples for step in run.steps] == [16, 16]
    assert run.failure is None


def test_what_fails_in_plain_torch_alone_is_refused() -> None:
    """As a hidden state does that is kept with its graph."""

    class Kept(nn.Linear):
        last: ClassVar[list[Tensor]] = []

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if self.last:
                y = y + 0 * self.last[-1].mean()
            self.last.append(y)
            return y

    with pytest.raises(CaptureError, match="batch 2 in plain torch, and what is captured does not"):
        compared(Kept(6, 3), mse_loss, _batches())


def test_small_batches_are_never_smaller_than_the_first_ones() -> None:
    clock = itertools.count(0.0, 100.0)
    sizes: list[int] = []

    def read(number: int, samples: int) -> tuple[Tensor, Tensor]:
        sizes.append(samples)
        return torch.randn(samples, 6), torch.zeros(samples, 3)

    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3))
    slow = ComparedBatches(least=4, most=4)
    run_plainly(model, mse_loss, read, None, range(1, 33), slow, lambda: next(clock))
    assert sizes == [4, 3, 4, 3]


def test_rounding_is_said_and_is_no_difference() -> None:
    numbers = iter(range(1000))
    found = compared(Scaled(lambda _: 1 + 1e-7 * next(numbers)), mse_loss, _batches())
    assert found.inexact
    least = torch.finfo(torch.float32).tiny / torch.finfo(torch.float32).eps
    small = [KeptValues.of(torch.tensor([n * least])) for n in (0.0, 0.9, 2.0)]
    one, other = (difference("a number", small[0], kept) for kept in small[1:])
    assert one is not None
    assert other is not None
    assert (one.is_rounding, other.is_rounding) == (True, False)


class Warns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        warnings.warn("mind the gap", stacklevel=1)
        out: Tensor = checkpoint(self.linear, x, use_reentrant=True)
        return out


def test_what_the_users_code_and_torch_warn_of_is_shown_once(
    recwarn: pytest.WarningsRecorder,
) -> None:
    model = nn.Sequential(Warns(), nn.Linear(3, 3))
    assert compared(model, mse_loss, _batches()).batches == 3
    said = [str(warning.message) for warning in recwarn]
    assert said.count("mind the gap") == 1
    assert len([text for text in said if "None of the inputs have requires_grad" in text]) == 1
    with pytest.raises(CaptureError):  # nothing is learnt behind such a checkpoint
        compared(Warns(), mse_loss, _batches())


class CheckpointedNorm(nn.Sequential):
    def __init__(self, reentrant: bool) -> None:
        super().__init__(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        def inside(x: Tensor) -> Tensor:
            x = checkpoint(self[1], x, use_reentrant=False) if not self.reentrant else self[1](x)
            return nn.functional.dropout(x, 0.5)

        x = checkpoint(inside, self[0](x), use_reentrant=self.reentrant)
        out: Tensor = self[2](x)
        return out


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_batch_norm_inside_checkpoints_counts_a_batch_as_often_as_in_plain_torch(
    reentrant: bool,
) -> None:
    model = CheckpointedNorm(reentrant)
    assert compared(model, mse_loss, _batches()).batches == 3


def test_standard_error_stays_everybodys_while_a_model_is_captured() -> None:
    seen: list[object] = []

    class Looks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(sys.stderr)
            return super().forward(x)

    stderr = sys.stderr
    compared(Looks(6, 3), mse_loss, _batches())
    assert all(stream is stderr for stream in seen)


class Normed(nn.Module):
    """Keeps its normalisation in evaluation mode, by a `train` of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.norm.running_mean.fill_(0.5)  # type: ignore[union-attr]

    def train(self, mode: bool = True) -> Normed:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.norm(x))
        return out


def test_a_train_of_the_user_s_own_is_called_as_a_loop_does() -> None:
    model = Normed()
    captured = capture(model, mse_loss, _batches(1)[0], evaluation=False)
    described = captured.description.train.nodes
    assert not [node for node in described if node.operator == "aten.add_.Tensor"]
    assert model.norm.training, "as it was"
    assert compared(model, mse_loss, _batches()) == Comparison(3)
    assert torch.equal(model.norm.running_mean, torch.full((6,), 0.5))  # type: ignore[arg-type]


class Halving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(x.mul_(0.5))
        return out


def test_a_model_that_writes_to_its_input_is_compared_with_the_same_input() -> None:
    assert compared(Halving(), mse_loss, _batches()) == Comparison(3)


def test_sparse_gradients_are_compared() -> None:
    words = nn.Sequential(nn.EmbeddingBag(9, 3, sparse=True))
    batches = [(torch.tensor([[k, 2], [1, k]]), torch.ones(2, 3)) for k in range(3)]
    assert compared(words, mse_loss, batches) == Comparison(3)


def test_a_large_tensor_is_compared_by_its_rows() -> None:
    class Last(nn.Embedding):
        """Adds to the gradient of one row, every other time."""

        numbers = itertools.count()

        def forward(self, x: Tensor) -> Tensor:
            self.weight.register_hook(lambda g: g.index_fill(0, torch.tensor(778), 1e-3))
            return super().forward(x).mean(1)

    batches = [(torch.tensor([[k, 2], [1, k]]), torch.ones(2, 7)) for k in range(3)]
    with pytest.raises(CaptureError, match=r"gradient of '0\.weight' .*norm of its row 778"):
        compared(nn.Sequential(Last(3000, 7)), mse_loss, batches)


class Skips(Scaled):
    """A part computes only the samples that are for it."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        rows = (x[:, 0] > 0).nonzero()[:, 0]
        if len(rows):
            hidden = hidden.index_add(0, rows, hidden[rows])
        out: Tensor = self.last(hidden)
        return out


def test_a_model_that_decides_otherwise_on_few_samples_is_refused() -> None:
    text = r"decides on .* differ: .* nothing is selected at .*\(`if len\(rows\):`\)"
    with pytest.raises(CaptureError, match=text):
        compared(Skips(lambda _: 1.0), mse_loss, _batches())
