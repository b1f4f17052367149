"""Which operators a received model may apply, and what each does besides computing.

A description comes from another device, so it may name anything. Only operators that read and write
nothing but the tensors they are given are listed: no files, no storages, no private kernels that
trust their caller's arguments (where one is useful, `trusting` looks at those first), nothing that
one large number keeps busy for ever (Legendre's and Laguerre's polynomials), nothing that computes
with Python's numbers or texts alone. The list is of ATen's public functions, whole families at a
time, so that any vision or text model fits; an in-place form (`relu_`) is allowed with its plain
form. `tools/fuzz_operators.py` calls all of them with what no model should give.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload

from p2ptrain.errors import ProtocolError
from p2ptrain.model.graph import checked_operators, packed_sequences
from p2ptrain.model.graph.argument_types import ArgumentTypes, can_be_checked
from p2ptrain.model.graph.custom_operators import (
    ARGUMENTS,
    GROUPED_MM,
    OWN_BACKWARD,
    grouped_mm,
    know_shapes,
    own_backward,
)

know_shapes()


def words(text: str) -> frozenset[str]:
    """Names that a text lists."""
    return frozenset(text.split())


_ATEN_FAMILIES = {
    "elementwise": """
        abs absolute acos acosh add addcdiv addcmul angle arccos arccosh arcsin arcsinh arctan
        arctan2 arctanh asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not
        bitwise_or bitwise_right_shift bitwise_xor ceil clamp clamp_max clamp_min clip complex conj
        conj_physical copysign cos cosh deg2rad digamma div divide eq erf erfc erfinv exp exp2 expm1
        fix float_power floor floor_divide fmax fmin fmod frac frexp gcd ge greater greater_equal gt
        heaviside hypot i0 imag isclose isfinite isinf isnan isneginf isposinf isreal lcm ldexp le
        lerp less less_equal lgamma log log10 log1p log2 logaddexp logaddexp2 logical_and
        logical_not logical_or logical_xor logit lt maximum minimum mul multiply mvlgamma nan_to_num
        ne neg negative nextafter not_equal polar polygamma positive pow rad2deg real reciprocal
        remainder round rsqrt rsub sgn sigmoid sign signbit sin sinc sinh sqrt square sub subtract
        tan tanh true_divide trunc where xlogy __and__ __or__ __xor__ __lshift__ __rshift__
        resolve_conj resolve_neg view_as_complex view_as_real special_erf special_erfc special_expit
        special_exp2 special_expm1 special_log1p special_logit special_softmax special_log_softmax
        special_logsumexp special_xlogy special_entr special_sinc special_i0 special_i0e special_i1
        special_i1e special_ndtr special_ndtri special_log_ndtr special_erfcx special_erfinv
        special_bessel_j0 special_bessel_j1 special_gammaln special_digamma special_psi
        special_xlog1py special_gammainc special_gammaincc igamma igammac special_zeta special_round
        special_polygamma special_multigammaln special_airy_ai special_bessel_y0 special_bessel_y1
        special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0
        special_modified_bessel_k1 special_scaled_modified_bessel_k0
        special_scaled_modified_bessel_k1 special_spherical_bessel_j0
        special_chebyshev_polynomial_t special_chebyshev_polynomial_u
        special_chebyshev_polynomial_v special_chebyshev_polynomial_w
        special_hermite_polynomial_h special_hermite_polynomial_he
        fake_quantize_per_tensor_affine fake_quantize_per_channel_affine""",
    "activations": """
        celu elu gelu glu hardshrink hardsigmoid hardswish hardtanh leaky_relu log_sigmoid
        log_sigmoid_forward log_softmax mish prelu relu relu6 rrelu selu silu softmax softplus
        softshrink threshold _softmax _log_softmax _safe_softmax _prelu_kernel""",
    "derivatives": """
        elu_backward gelu_backward hardtanh_backward leaky_relu_backward mse_loss_backward
        select_backward sigmoid_backward silu_backward slice_backward softplus_backward
        tanh_backward threshold_backward _softmax_backward_data _log_softmax_backward_data
        convolution_backward native_layer_norm_backward nll_loss_backward log_sigmoid_backward
        huber_loss_backward smooth_l1_loss_backward""",
    "reductions": """
        all amax amin aminmax any argmax argmin bincount count_nonzero cummax cummin cumprod cumsum
        diff dist frobenius_norm histc kthvalue logcumsumexp logsumexp max mean median min mode
        nanmean nanmedian nansum norm nuclear_norm prod quantile nanquantile segment_reduce std
        std_mean sum sum_to_size trace var var_mean linalg_norm linalg_vector_norm
        linalg_matrix_norm equal""",
    "linear_algebra": """
        addbmm addmm addmv addr baddbmm bilinear bmm cdist chain_matmul cosine_similarity cross det
        dot einsum inner inverse kron linear logdet matmul matrix_exp matrix_power mm mv outer
        pairwise_distance pdist slogdet tensordot vdot vander linalg_cross linalg_det linalg_inv
        linalg_cholesky linalg_solve linalg_matrix_exp linalg_qr linalg_svd linalg_eigh
        linalg_multi_dot linalg_vecdot linalg_slogdet linalg_eigvalsh linalg_svdvals linalg_pinv
        linalg_solve_triangular linalg_diagonal cholesky cholesky_solve cholesky_inverse cov
        corrcoef trapezoid cumulative_trapezoid _weight_norm norm_except_dim linalg_matrix_power
        linalg_matmul linalg_vander linalg_eig linalg_eigvals linalg_inv_ex linalg_cholesky_ex
        linalg_solve_ex linalg_lu linalg_lu_factor linalg_lu_factor_ex linalg_lu_solve lu_unpack
        linalg_matrix_rank linalg_cond linalg_tensorinv linalg_tensorsolve svd qr pinverse
        linalg_householder_product orgqr ormqr linalg_ldl_factor linalg_ldl_factor_ex
        triangular_solve ger trapz _grouped_mm""",
    "convolution_and_pooling": """
        adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d
        adaptive_max_pool2d adaptive_max_pool3d affine_grid_generator avg_pool1d avg_pool2d
        avg_pool3d col2im conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d
        conv_transpose3d convolution grid_sampler grid_sampler_2d grid_sampler_3d im2col max_pool1d
        max_pool1d_with_indices max_pool2d max_pool2d_with_indices max_pool3d
        max_pool3d_with_indices max_unpool2d max_unpool3d upsample_bicubic2d upsample_bilinear2d
        upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d
        upsample_trilinear3d _upsample_nearest_exact1d _upsample_nearest_exact2d
        _upsample_nearest_exact3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa
        _adaptive_avg_pool2d _adaptive_avg_pool3d fractional_max_pool2d fractional_max_pool3d""",
    "normalisation": """
        batch_norm group_norm instance_norm layer_norm native_group_norm
        native_layer_norm rms_norm renorm _fused_rms_norm""",
    "losses": """
        binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss
        cross_entropy_loss ctc_loss hinge_embedding_loss huber_loss kl_div l1_loss
        margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss nll_loss nll_loss2d
        nll_loss_forward nll_loss2d_forward nll_loss_nd poisson_nll_loss smooth_l1_loss
        soft_margin_loss triplet_margin_loss""",
    "sequences": """
        embedding embedding_bag embedding_renorm gru gru_cell lstm lstm_cell rnn_relu rnn_relu_cell
        rnn_tanh rnn_tanh_cell scaled_dot_product_attention one_hot bucketize searchsorted
        pad_sequence _pack_padded_sequence _pad_packed_sequence""",
    "shapes": """
        adjoint alias as_strided atleast_1d atleast_2d atleast_3d block_diag broadcast_tensors
        broadcast_to cartesian_prod cat channel_shuffle chunk clone column_stack combinations concat
        concatenate constant_pad_nd contiguous copy detach diag diag_embed diagflat diagonal dsplit
        dstack expand expand_as flatten flip fliplr flipud hsplit hstack lift_fresh lift_fresh_copy
        mH mT matrix_H meshgrid moveaxis movedim narrow numpy_T pad permute pixel_shuffle
        pixel_unshuffle ravel reflection_pad1d reflection_pad2d reflection_pad3d repeat
        repeat_interleave replication_pad1d replication_pad2d replication_pad3d reshape reshape_as
        roll rot90 row_stack select slice slice_inverse split split_with_sizes squeeze stack
        swapaxes swapdims t tensor_split tile transpose tril triu unbind unflatten unfold
        unsafe_chunk unsafe_split unsafe_split_with_sizes unsqueeze view view_as vsplit vstack
        _unsafe_view expand_copy permute_copy select_copy slice_copy view_copy
        unsqueeze_copy squeeze_copy transpose_copy t_copy alias_copy detach_copy""",
    "indexing": """
        argsort argwhere fill fill_diagonal gather index index_add index_copy index_fill index_put
        index_reduce index_select isin masked_fill masked_scatter masked_select msort nonzero
        nonzero_numpy nonzero_static put scatter scatter_add scatter_reduce select_scatter
        slice_scatter diagonal_scatter as_strided_scatter sort take take_along_dim topk
        unique_consecutive unique_dim zero _unique2 """,
    "types_and_creation": """
        arange bartlett_window blackman_window empty empty_like empty_permuted eye full full_like
        hamming_window hann_window kaiser_window linspace logspace new_empty new_full new_ones
        new_zeros ones ones_like scalar_tensor to tril_indices triu_indices type_as zeros
        zeros_like _to_copy item _local_scalar_dense sym_size sym_numel sym_stride
        sym_storage_offset is_nonzero _assert_async""",
    "random": """
        alpha_dropout bernoulli cauchy dropout exponential feature_alpha_dropout feature_dropout
        geometric log_normal multinomial native_dropout normal poisson rand rand_like
        randint randint_like randn randn_like randperm random uniform _sample_dirichlet
        _standard_gamma""",
    "signals": """
        fft_fft fft_fft2 fft_fftn fft_fftshift fft_hfft fft_ifft fft_ifft2 fft_ifftn fft_ifftshift
        fft_hfft2 fft_hfftn fft_ihfft fft_ihfft2 fft_ihfftn fft_irfft fft_irfft2 fft_irfftn fft_rfft
        fft_rfft2 fft_rfftn fft_fftfreq fft_rfftfreq istft stft""",
}

_ATEN_NAMES = frozenset(name for names in _ATEN_FAMILIES.values() for name in names.split())

_PYTHON: Mapping[str, Callable[..., Any]] = {
    "operator.getitem": operator.getitem,
    "operator.add": operator.add,
    "operator.sub": operator.sub,
    "operator.mul": operator.mul,
    "operator.floordiv": operator.floordiv,
    "operator.truediv": operator.truediv,
    "operator.mod": operator.mod,
    "operator.neg": operator.neg,
    "operator.eq": operator.eq,
    "operator.ne": operator.ne,
    "operator.lt": operator.lt,
    "operator.le": operator.le,
    "operator.gt": operator.gt,
    "operator.ge": operator.ge,
    "operator.and_": operator.and_,
    "operator.or_": operator.or_,
    "math.ceil": math.ceil,
    "math.floor": math.floor,
    "math.trunc": math.trunc,
    "torch.sym_max": max,
    "torch.sym_min": min,
    "torch.sym_int": int,
    "torch.sym_float": float,
    "torch.sym_not": operator.not_,
}
"""Arithmetic on sizes (Python numbers of 64 bits) and picking one of several results. `pow` is not
here: it would let three small numbers fill a memory."""


def _of_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` for numbers that give a number: texts and lists can be multiplied as well."""

    def call(*args: Any) -> Any:
        if not all(type(argument) in (int, float, bool) for argument in args):
            raise ValueError(f"{function.__name__} is for numbers only")
        try:
            result = function(*args)
        except (ArithmeticError, TypeError) as error:
            raise ValueError(f"{function.__name__} of these numbers: {error}") from error
        if type(result) is int and not -(2**63) <= result < 2**63:
            raise ValueError(f"{function.__name__} gives a number of more than 64 bits")
        return result

    return call


def _item_of(results: Any, index: Any) -> Any:
    """One of the results of an operator that has several."""
    if not isinstance(results, list | tuple) or type(index) is not int:
        raise IndexError("there is one result only, or none of that number")
    return results[index]


_PYTHON_CALLS: Mapping[str, Callable[..., Any]] = {
    name: _item_of if function is operator.getitem else _of_numbers(function)
    for name, function in _PYTHON.items()
}

_VIEWS_UNDECLARED = words(
    """
        dropout alpha_dropout feature_dropout feature_alpha_dropout type_as
        broadcast_tensors meshgrid atleast_1d atleast_2d atleast_3d pad constant_pad_nd
        einsum getitem rrelu conj_physical sum_to_size cartesian_prod chain_matmul
        unsafe_chunk unsafe_split unsafe_split_with_sizes _unsafe_view
    """
)
"""Operators that may return one of their arguments, or a view of it, without saying so."""

_WITHOUT_GRADIENT = words(
    """
        detach detach_ zeros_like ones_like full_like empty_like rand_like randn_like
        randint_like new_zeros new_ones new_full new_empty arange zeros ones full empty eye
        linspace rand randn multinomial one_hot
    """
)
"""Operators whose result never requires a gradient even where an argument does."""

_CHECKED: Mapping[str, Callable[..., Any]] = {
    GROUPED_MM: grouped_mm,
    **packed_sequences.CHECKED,
    **checked_operators.CHECKED,
}
"""Operators that are called through a function which looks at their arguments' values first."""


@dataclass(frozen=True, slots=True)
class Operator:
    """An allowed operator, ready to be called.

    Attributes:
        name: as it stands in a `Node`.
        call: the function.
        overload: ATen's own of that name, which looks at less than `call`; None: it has none.
        types: what its arguments may be; None for what ATen does not compute.
        schema_arguments: names of its positional arguments, () for arithmetic on sizes.
        mutates: positions of the arguments that it writes to.
        returned: positions of the arguments that its result may share memory with; None for all.
        seeded: whether it may draw from the random generator.
        differentiable: False where its result never requires a gradient.
    """

    name: str
    call: Callable[..., Any]
    overload: OpOverload | None
    types: ArgumentTypes | None
    schema_arguments: tuple[str, ...]
    mutates: frozenset[int]
    returned: frozenset[int] | None
    seeded: bool
    differentiable: bool


@cache
def resolve(name: str) -> Operator:
    """Look `name` up in the allow-list.

    Raises:
        ProtocolError: it is not an operator that a model may apply.
    """
    if name in _PYTHON:
        views = name == "operator.getitem"
        returned = frozenset({0}) if views else frozenset[int]()
        call = _PYTHON_CALLS[name]
        return Operator(name, call, None, None, (), frozenset(), returned, False, views)
    if name == OWN_BACKWARD:
        none, outputs = frozenset[int](), frozenset({0})
        return Operator(name, own_backward, None, None, ARGUMENTS, none, outputs, False, True)
    overload = _aten_overload(name)
    if overload is None:
        raise ProtocolError(f"a model may not apply the operator {name[:80]!r}")
    return _describe(name, overload)


def is_allowed(name: str) -> bool:
    """Whether `resolve` knows `name`."""
    return name in _PYTHON or name == OWN_BACKWARD or _aten_overload(name) is not None


def name_of(target: object) -> str | None:
    """The name under which a node's function travels; None where it has none."""
    if isinstance(target, OpOverload):
        return str(target)
    if target in _SIZE_FUNCTIONS:
        return _SIZE_FUNCTIONS[target]
    return next((name for name, function in _PYTHON.items() if function is target), None)


_SIZE_FUNCTIONS: Mapping[object, str] = {
    torch.sym_max: "torch.sym_max",
    torch.sym_min: "torch.sym_min",
    torch.sym_int: "torch.sym_int",
    torch.sym_float: "torch.sym_float",
    torch.sym_not: "torch.sym_not",
}


def _aten_overload(name: str) -> OpOverload | None:
    parts = name.split(".")
    if len(parts) != 3 or parts[0] != "aten" or _base(parts[1]) not in _ATEN_NAMES:
        return None
    packet = getattr(torch.ops.aten, parts[1], None)
    if packet is None or parts[2] not in packet.overloads():
        return None
    overload = getattr(packet, parts[2])
    if parts[2].startswith("prim_") or not isinstance(overload, OpOverload):
        return None
    return overload if _is_plain(overload) else None


def _base(function: str) -> str:
    """`relu` for `relu_`; dunder names keep theirs."""
    return function[:-1] if function.endswith("_") and not function.endswith("__") else function


def _is_plain(overload: OpOverload) -> bool:
    """Whether it takes plain data and computes with tensors: no storages, no output buffers."""
    schema = overload._schema
    return can_be_checked(schema) and not any(argument.is_out for argument in schema.arguments)


def _of_tensors(function: Callable[..., Any], overload: OpOverload) -> Callable[..., Any]:
    """`function`, which gets no numbers in the place of tensors, as ATen's own may."""
    arguments = overload._schema.arguments
    meant = frozenset(a.name for a in arguments if "Tensor" in str(a.real_type))
    names = [argument.name for argument in arguments]

    def call(*args: Any, **kwargs: Any) -> Any:
        for name, given in (*zip(names, args, strict=False), *kwargs.items()):
            if name in meant and not _are_tensors(given):
                raise IndexError(f"{overload} gets something else than a tensor as {name!r}")
        return function(*args, **kwargs)

    return call


def _are_tensors(given: Any) -> bool:
    if isinstance(given, list | tuple):
        return all(map(_are_tensors, given))
    return given is None or isinstance(given, torch.Tensor)


def _describe(name: str, overload: OpOverload) -> Operator:
    arguments = overload._schema.arguments
    function = name.split(".")[1]
    mutates = {i for i, a in enumerate(arguments) if a.alias_info and a.alias_info.is_write}
    if function in ("batch_norm", "native_batch_norm", "instance_norm"):
        # The schema does not say that the running statistics are written.
        names = ("running_mean", "running_var")
        mutates |= {i for i, a in enumerate(arguments) if a.name in names}
    returned = frozenset(i for i, a in enumerate(arguments) if a.alias_info is not None)
    return Operator(
        name=name,
        call=_of_tensors(_CHECKED[name], overload) if name in _CHECKED else overload,
        overload=overload,
        types=ArgumentTypes(overload._schema),
        schema_arguments=tuple(argument.name for argument in arguments),
        mutates=frozenset(mutates),
        returned=None if _base(function) in _VIEWS_UNDECLARED else returned,
        seeded=torch.Tag.nondeterministic_seeded in overload.tags,
        differentiable=function not in _WITHOUT_GRADIENT,
    )
