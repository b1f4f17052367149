"""Lines that only check values: an assertion, an `if` that ends in `raise`.

A trace has no values. Such a line has no effect but to stop, so a trace passes it as if all was
well; the user's own module, which computes the first batches beside the
captured one, still runs it.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

_OURS = str(Path(__file__).parents[2])


class ValueChecks(TorchFunctionMode):
    """Answers a check as it passes, and notes its line in `passed`: "FILE:LINE (`code`)"."""

    def __init__(self, passed: set[str]) -> None:
        super().__init__()
        self._passed = passed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__bool__ and isinstance(args[0], FakeTensor):
            frame = _asking()
            passing = passing_value(frame)
            if passing is not None:
                self._passed.add(_line(frame))
                return passing
        return func(*args, **(kwargs or {}))


def _asking() -> FrameType:
    """The innermost frame that is not of this package, whose modes call each other."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(_OURS) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _line(frame: FrameType) -> str:
    code = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    return f"{frame.f_code.co_filename}:{frame.f_lineno} (`{code}`)"


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
