"""What is kept is found, compared and put back, and what is data is left alone."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import pytest
from torch import nn

from p2ptrain.model.tracing import python_state
from p2ptrain.model.tracing.python_state import PythonState


class _Refuses:
    """Nobody may ask whether it is true."""

    def __bool__(self) -> bool:
        raise TypeError("ambiguous")


def _root() -> SimpleNamespace:
    module = nn.Sequential(nn.Linear(2, 2))
    module.odd = _Refuses()
    root = SimpleNamespace(module=module, queue=deque([1, 2], 3), names={"a"}, number=1)
    root.itself = root
    return root


def test_every_change_is_named_and_put_back() -> None:
    root = _root()
    before = PythonState({"r": root})
    assert before.changed() == []
    root.queue.append(3)
    root.names.add("b")
    root.number = True
    root.module[0].seen = [1]
    del root.module.odd
    found = set(before.changed())
    assert found == {"r.queue.2", "r.names.b", "r.number", "r.module.0.seen", "r.module.odd"}
    before.put_back()
    assert before.changed() == []
    assert (root.queue, root.names, type(root.number)) == (deque([1, 2], 3), {"a"}, int)
    assert root.queue.maxlen == 3
    assert not hasattr(root.module[0], "seen")


def test_data_is_not_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    many = SimpleNamespace(samples=[0, 1, 2, 3])
    assert len(PythonState({"": many}).places) == 2
    monkeypatch.setattr(python_state, "_MAX_ITEMS", 3)
    assert len(PythonState({"": many}).places) == 1
    monkeypatch.setattr(python_state, "_MAX_PLACES", 5)
    assert len(PythonState({"": [[n] for n in range(3)] + [[[[[[[]]]]]]]}).places) <= 5
