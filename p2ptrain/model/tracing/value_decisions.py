"""Lines of Python that ask for the values of tensors: a trace has none.

A line that only checks something (an assertion, an `if` that ends in `raise`) passes. Other
decisions (`if mask.any():`) go the way of the first samples, if all of those go the same way; a
number of selected elements is taken for one that is not zero. Each becomes a node that looks at
the values of every micro-batch, and ends the training where one goes another way.
"""

from __future__ import annotations

import ast
import contextlib
import linecache
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.overrides import TorchFunctionMode

from p2ptrain.model.graph.checked_operators import UNLIKE
from p2ptrain.model.tracing.trace_patches import replaced_in_this_thread

OURS = f"{Path(__file__).parents[2]}{os.sep}"
"""How the paths of this package's files begin."""

TORCH = f"{Path(torch.__file__).parent}{os.sep}"

_SOME = (1, 1000)
"""Numbers of selected elements for which a decision must be the same."""

_CODE_CHARACTERS = 120

_CHOOSE = "Choose with torch.where or a mask: what is captured goes one way only"

_LEAVE_OUT = "Leave that `if` out: operations on no elements do nothing"


class ValueDecisions:
    """Which way the first samples go; a trace goes the same way."""

    def __init__(self) -> None:
        self._answers: list[tuple[str, bool]] = []
        self._asked = 0
        self._recorded: list[tuple[str, bool]] | None = None

    def begin(self) -> None:
        """Start again with the first answer: forward() begins."""
        self._asked = 0

    def learn(self, runs: Sequence[Callable[[], object]]) -> bool:
        """Run the model with real values; whether there are decisions, the same in all runs."""
        self._answers, found = [], []
        for run in runs:
            self._recorded = []
            found.append(self._recorded)
            try:
                run()
            finally:
                self._recorded = None
        if all(one == found[0] for one in found):
            self._answers = found[0]
        return bool(self._answers)

    def forget(self) -> None:
        """What was learned is of another mode of the model."""
        self._answers = []

    @contextlib.contextmanager
    def answered(self) -> Iterator[None]:
        """What stands between the model and torch, while it is traced or learned from."""
        count = torch.SymBool.__bool__
        with _Asked(self), replaced_in_this_thread(torch.SymBool, "__bool__", _of_count(count)):
            yield

    def decide(self, condition: Tensor, ask: Callable[[], bool]) -> bool:
        """The truth of `condition`; `ask` is torch's own way to it."""
        frame = _asking()
        place = _place(frame)
        if not isinstance(condition, FakeTensor):
            answer = ask()
            if self._recorded is not None:
                self._recorded.append((place, answer))
            return answer
        checked = passing_value(frame)
        if self._asked < len(self._answers) and self._answers[self._asked][0] == place:
            decided = self._answers[self._asked][1]
            self._asked += 1
        elif checked is not None:
            decided = checked
        else:
            return ask()
        text = f"{place} goes another way. {_CHOOSE}" if checked is None else f"{place} fails"
        _expect(condition if decided else condition.logical_not(), text)
        return decided


class _Asked(TorchFunctionMode):
    def __init__(self, decisions: ValueDecisions) -> None:
        super().__init__()
        self._decisions = decisions

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_item = func is Tensor.item and args[0].dtype is torch.bool
        if is_item or func is Tensor.__bool__:
            return self._decisions.decide(args[0], lambda: func(*args, **(kwargs or {})))
        return func(*args, **(kwargs or {}))


def _of_count(original: Callable[[torch.SymBool], bool]) -> Callable[[torch.SymBool], bool]:
    """`bool()` of a condition on numbers of selected elements, where it only asks for none."""

    def decide(condition: torch.SymBool) -> bool:
        frame = _asking()
        if frame.f_code.co_name == "__bool__" and frame.f_back is not None:
            frame = frame.f_back  # a number itself was asked
        symbols, node = free_unbacked_symbols(condition), _node(condition)
        are_counts = bool(symbols) and symbols <= node.shape_env.size_like
        if not are_counts or frame.f_code.co_filename.startswith(TORCH):
            return original(condition)
        few, many = (node.expr.subs(dict.fromkeys(symbols, number)) for number in _SOME)
        known = node.shape_env._maybe_evaluate_static(node.expr)
        if known is not None or few != many or few not in (True, False):
            return original(condition)
        decided = bool(few)
        symbolic: Any = torch
        expected = condition if decided else symbolic.sym_not(condition)
        symbolic._check(expected)
        text = f"nothing is selected at {_place(frame)}. {_LEAVE_OUT}"
        _expect(symbolic.scalar_tensor(expected, dtype=torch.bool), text)
        return decided

    return decide


def _node(condition: torch.SymBool) -> Any:
    return condition.node


def _expect(condition: Tensor, text: str) -> None:
    """Put a node into the trace that raises `text` where `condition` is false."""
    torch.ops.aten._assert_async.msg(condition, UNLIKE + text)


def _asking() -> FrameType:
    """The innermost frame that is not of this package, whose modes call each other."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(OURS) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _place(frame: FrameType) -> str:
    path = frame.f_code.co_filename
    code = linecache.getline(path, frame.f_lineno).strip()[:_CODE_CHARACTERS]
    return f"{Path(path).name}:{frame.f_lineno} (`{code}`)"


def only_checks(filename: str, line: int) -> bool:
    """Whether that line's statement has no effect but to stop; False where that is unknown."""
    return _check_at(filename, line) is not None


def passing_value(frame: FrameType) -> bool | None:
    """What the tensor must be whose truth `frame` asks for, so that the check there passes.

    None where it is no check.
    """
    node = _check_at(frame.f_code.co_filename, frame.f_lineno)
    if node is None or not frame.f_lasti:
        return None
    computed = frame.f_lasti // 2 - 1  # the jump's own position may be another part's
    line, _, column, _ = next(islice(frame.f_code.co_positions(), computed, None))
    if line is None or column is None:
        return None
    wanted = _wanted(node.test, isinstance(node, ast.Assert))
    return next((result for part, result in wanted if _is_in((line, column), part)), None)


def _wanted(test: ast.expr, result: bool) -> Iterator[tuple[ast.expr, bool]]:
    """Of every part of `test` whose truth is asked for, so that all of it is `result`."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _wanted(test.operand, not result)
    elif isinstance(test, ast.BoolOp):
        for part in test.values:
            yield from _wanted(part, result)
    else:
        yield test, result


def _is_in(place: tuple[int, int], part: ast.expr) -> bool:
    last = part.end_lineno or part.lineno, part.end_col_offset or part.col_offset
    return (part.lineno, part.col_offset) <= place <= last


def _check_at(filename: str, line: int) -> ast.Assert | ast.If | None:
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError):  # no Python, as the cells of some notebooks
        return None
    found = (node for node in ast.walk(tree) if isinstance(node, ast.Assert | ast.If))
    return next((node for node in found if _is_check(node, line)), None)


def _is_check(node: ast.Assert | ast.If, line: int) -> bool:
    if isinstance(node, ast.Assert):
        return node.lineno <= line <= (node.end_lineno or node.lineno)
    is_condition = node.lineno <= line <= (node.test.end_lineno or node.lineno)
    return is_condition and not node.orelse and isinstance(node.body[-1], ast.Raise)
