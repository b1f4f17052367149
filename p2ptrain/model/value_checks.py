"""Whether a line of Python only checks something: an assertion, or an `if` that ends in `raise`."""

from __future__ import annotations

import ast
import linecache


def only_checks(filename: str, line: int) -> bool:
    """Whether that line's statement has no effect but to stop; False where nobody can tell."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError):  # no Python, as the cells of some notebooks
        return False
    return any(_is_check(node, line) for node in ast.walk(tree))


def _is_check(node: ast.AST, line: int) -> bool:
    if isinstance(node, ast.Assert):
        return node.lineno <= line <= (node.end_lineno or node.lineno)
    if isinstance(node, ast.If):
        is_condition = node.lineno <= line <= (node.test.end_lineno or node.lineno)
        return is_condition and not node.orelse and isinstance(node.body[-1], ast.Raise)
    return False
