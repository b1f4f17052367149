"""What forward() keeps in Python: refused where another batch would be computed otherwise."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from p2ptrain.errors import CaptureError
from p2ptrain.model.capture.comparison import Comparison
from tests.support.compared import compared

_BATCHES = [(torch.randn(4, 8), torch.randn(4, 8)) for _ in range(3)]


class _Model(nn.Module):
    """A linear layer, then `f(self.inner, x)`; `inner` keeps something of every kind."""

    def __init__(self, f: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.inner = nn.Module()
        self.inner.weight = nn.Parameter(torch.ones(8))
        self.inner.ready, self.inner.mode, self.inner.kept = False, "a", None
        self.inner.list, self.inner.dict, self.inner.queue = [], {"n": 0}, deque([1.0], 4)
        self.inner.helper = SimpleNamespace(n=0, kept=None, inside=[{}])
        self.inner.register_buffer("seen", torch.zeros(8))
        self.f = f

    def forward(self, x: Tensor) -> Tensor:
        return self.f(self.inner, self.linear(x))


def _starts_from_the_first_batch(m: Any, x: Tensor) -> Tensor:
    if not m.ready:
        with torch.no_grad():
            m.weight.copy_(-x.mean(0))
        m.ready = True
    return x + m.weight


def _hooks_in_the_first_call(m: Any, x: Tensor) -> Tensor:
    """As transformers' models do that ask themselves for hidden states."""
    if not m.ready:
        m.layer.register_forward_hook(lambda part, given, made: m.list.append(made))
        m.ready = True
    m.list.clear()
    y: Tensor = m.layer(x)
    assert len(m.list) == 1
    m.list.clear()
    return y * m.weight


def _hidden_state(m: Any, x: Tensor) -> Tensor:
    y = x if m.kept is None else x + m.kept
    m.kept = x.detach().mean(0)
    return y


def _mean_of_the_first_batch(m: Any, x: Tensor) -> Tensor:
    if m.kept is None:
        m.kept = x.detach().mean(0)
    return x - m.kept


def _first_weight(m: Any, x: Tensor) -> Tensor:
    if m.kept is None:
        m.kept = m.weight.detach() * 2
    return x * m.kept


def _first_statistics_converted(m: Any, x: Tensor) -> Tensor:
    if m.kept is None:
        m.kept = m.seen.to(torch.float64)
    m.seen.add_(1)
    return x + m.kept.float()


def _drawn_once(m: Any, x: Tensor) -> Tensor:
    if m.kept is None:
        m.kept = torch.randn(8)
    return x * m.kept


def _made_and_written(m: Any, x: Tensor) -> Tensor:
    if m.kept is None:
        m.kept = torch.zeros(8)
    m.kept[0] += 1
    return x + m.kept


def _remembers_in_a_list(m: Any, x: Tensor) -> Tensor:
    y = x + sum(m.list) if m.list else x
    m.list.append(x.detach().mean(0))
    return y


def _counts_in_a_dict(m: Any, x: Tensor) -> Tensor:
    m.dict["n"] += 1
    return x * m.dict["n"]


def _counts_in_an_object(m: Any, x: Tensor) -> Tensor:
    m.helper.n += 1
    return x * m.helper.n


def _counts_deep_inside(m: Any, x: Tensor) -> Tensor:
    m.helper.inside[0]["n"] = m.helper.inside[0].get("n", 0) + 1
    return x * m.helper.inside[0]["n"]


def _counts_in_a_queue(m: Any, x: Tensor) -> Tensor:
    m.queue.append(m.queue[-1] + 1)
    return x * m.queue[-1]


def _alternates(m: Any, x: Tensor) -> Tensor:
    m.mode = "b" if m.mode == "a" else "a"
    return x * 2 if m.mode == "b" else x


def _writes_once(m: Any, x: Tensor) -> Tensor:
    if not m.ready:
        m.seen.add_(1)
    m.ready = True
    return x + m.seen


@pytest.mark.parametrize(
    ("f", "names"),
    [
        (_starts_from_the_first_batch, "inner.ready"),
        (_hidden_state, "inner.kept"),
        (_mean_of_the_first_batch, "inner.kept"),
        (_first_weight, "inner.kept"),
        (_first_statistics_converted, "inner.kept"),
        (_drawn_once, "inner.kept"),
        (_made_and_written, "inner.kept"),
        (_remembers_in_a_list, "inner.list.0"),
        (_counts_in_a_dict, "inner.dict.n"),
        (_counts_in_an_object, "inner.helper.n"),
        (_counts_deep_inside, "inner.helper.inside.0.n"),
        (_counts_in_a_queue, "inner.queue."),
        (_alternates, "inner.mode"),
        (_writes_once, "inner.ready"),
    ],
)
def test_what_a_second_batch_would_compute_otherwise_is_refused(
    f: Callable[[Any, Tensor], Tensor], names: str
) -> None:
    model = _Model(f)
    with pytest.raises(CaptureError, match="computes something else than the module itself") as e:
        compared(model, mse_loss, _BATCHES)
    assert f"its calls change {names}" in str(e.value)
    assert _kept(model) == _kept(_Model(f))


def _kept(model: Any) -> list[object]:
    names = ("ready", "mode", "kept", "list", "dict", "queue", "helper")
    return [getattr(model.inner, name) for name in names]


def _mask_made_once(m: Any, x: Tensor) -> Tensor:
    if m.kept is None:
        m.kept = torch.arange(8) > 3
    return x.masked_fill(m.kept, 0.0)


def _table_by_length(m: Any, x: Tensor) -> Tensor:
    if x.shape[1] not in m.dict:
        table = torch.zeros(x.shape[1])
        table[0::2], table[1::2] = torch.arange(4).sin(), torch.arange(4).cos()
        m.dict[x.shape[1]] = table
    return x + m.dict[x.shape[1]]


def _literal_made_once(m: Any, x: Tensor) -> Tensor:
    if m.helper.kept is None:
        m.helper.kept = torch.tensor([1.0, 2.0]).repeat(4)
    return x * m.helper.kept


def _mask_of_the_batch(m: Any, x: Tensor) -> Tensor:
    if m.kept is None or m.kept.shape[0] != x.shape[0]:
        m.kept = torch.ones(x.shape[0], 1)
    return x * m.kept


def _counts_for_nobody(m: Any, x: Tensor) -> Tensor:
    m.dict["n"] += 1
    m.helper.kept = x
    m.list.append(x.shape[0])
    m.seen.mul_(0.9).add_(x.detach().mean(0))
    return x * torch.tensor(2.0) + m.seen + torch.randn(8)


def _converts_what_it_has(m: Any, x: Tensor) -> Tensor:
    """Conversions to what something is already give that thing itself."""
    m.kept = m.seen.to(x.dtype).contiguous() + m.weight.type_as(x)
    return x + m.kept


def _pruned(m: Any, x: Tensor) -> Tensor:
    """As torch.nn.utils.prune does it before every call."""
    m.kept = m.seen.to(dtype=m.weight.dtype) * m.weight
    return x * m.kept


@pytest.mark.parametrize(
    "f",
    [
        _mask_made_once,
        _converts_what_it_has,
        _pruned,
        _table_by_length,
        _literal_made_once,
        _mask_of_the_batch,
        _counts_for_nobody,
    ],
)
def test_what_every_batch_computes_alike_is_taken_and_left_as_it_was(
    f: Callable[[Any, Tensor], Tensor],
) -> None:
    model = _Model(f)
    assert compared(model, mse_loss, _BATCHES) == Comparison(3)
    assert _kept(model) == _kept(_Model(f))


def test_what_the_first_call_installs_and_nothing_computes_with_is_no_state() -> None:
    model = _Model(_hooks_in_the_first_call)
    model.inner.layer = nn.Tanh()
    before = str(vars(model.inner.layer))
    assert compared(model, mse_loss, _BATCHES) == Comparison(3)
    assert not model.inner.ready
    assert str(vars(model.inner.layer)) == before
    assert model(_BATCHES[0][0]).shape == (4, 8)
