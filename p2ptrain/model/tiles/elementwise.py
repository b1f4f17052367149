"""Operators that compute every position of a map from the same position of others."""

from __future__ import annotations

from p2ptrain.model.operators import words

UNARY = words(
    """
        abs neg negative exp expm1 log log1p log2 sqrt rsqrt square sin cos tanh atan erf
        sigmoid relu relu6 leaky_relu hardtanh hardsigmoid hardswish elu celu selu silu mish gelu
        softplus hardshrink softshrink threshold log_sigmoid clamp clamp_min clamp_max clip clone
        contiguous detach reciprocal pow nan_to_num prelu
    """
)
"""Of one map; other arguments are numbers, or one number a channel."""

BINARY = words(
    """
        add sub subtract rsub mul multiply div divide true_divide maximum minimum
    """
)
"""Of two maps of the same size, or of a map and numbers."""

IDENTITIES = words("dropout feature_dropout alias lift_fresh positive")
"""They give their argument itself (a dropout only where it is switched off)."""

CASTS = words("to type_as")
"""Of them those to the element type that the map has: its argument itself, or a copy."""

MAY_ALIAS = words("contiguous detach to")
"""Their result may be the argument, so neither may be written to afterwards."""


def function_of(operator: str) -> str:
    """`relu` for "aten.relu_.default"."""
    return operator.split(".")[1].rstrip("_")


def is_in_place(operator: str) -> bool:
    """Whether it writes to its first argument."""
    return operator.split(".")[1].endswith("_")


def out_of_place(operator: str) -> str:
    """The form that leaves its arguments alone: "aten.relu.default"."""
    family, function, overload = operator.split(".")
    return f"{family}.{function.rstrip('_')}.{overload}"
