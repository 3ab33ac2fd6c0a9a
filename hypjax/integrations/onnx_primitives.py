"""What JAX's primitives are in ONNX: those of hypjax's encoders, heads and spaces, and a few more.

A rule takes the graph, the equation and its inputs, and returns the outputs. Inputs of elementwise
rules may have axes of length 1 in place of longer ones, as ONNX and NumPy broadcast them; those of
others have the equation's shapes.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from onnx import helper

from hypjax.errors import UserError
from hypjax.integrations.onnx_graph import (
    Graph,
    Shape,
    Tensor,
    counts_images,
    integers,
    known,
    lengths,
)

Rule = Callable[..., Tensor | list[Tensor]]


def unsupported(graph: Graph, equation: core.JaxprEqn, why: str = "") -> UserError:
    """The error for an operation without a rule, or of which its rule covers a part only."""
    return UserError(
        f"{graph.scope or 'the model'} computes {equation.primitive.name}{why}, which hypjax does "
        "not convert to ONNX; write it with other operations"
    )


def _shape(equation: core.JaxprEqn) -> Shape:
    return equation.outvars[0].aval.shape


def _onnx_type(dtype: Any) -> int:
    return helper.np_dtype_to_tensor_dtype(np.dtype(dtype))


# Elementwise.


def _same(op: str) -> Rule:
    """The rule of an operation that ONNX has, too."""

    def rule(graph: Graph, equation: core.JaxprEqn, *inputs: Tensor) -> Tensor:
        shape = np.broadcast_shapes(*(each.shape for each in inputs))
        return graph.add(op, inputs, shape)

    return rule


def _then(*ops: str) -> Rule:
    """The rule of an operation that several of ONNX make up, one after the other."""

    def rule(graph: Graph, equation: core.JaxprEqn, *inputs: Tensor) -> Tensor:
        found = _same(ops[0])(graph, equation, *inputs)
        for op in ops[1:]:
            found = graph.add(op, [found], found.shape)
        return found

    return rule


def _identity(graph: Graph, equation: core.JaxprEqn, *inputs: Tensor) -> list[Tensor]:
    return list(inputs)


def _logical(op: str) -> Rule:
    """The rule of an operation that ONNX has for truth values alone."""

    def rule(graph: Graph, equation: core.JaxprEqn, *inputs: Tensor) -> Tensor:
        if equation.invars[0].aval.dtype != bool:
            raise unsupported(graph, equation, " of the bits of integers")
        return _same(op)(graph, equation, *inputs)

    return rule


def _precision(graph: Graph, equation: core.JaxprEqn, x: Tensor) -> Tensor:
    own, kind = equation.params, jnp.finfo(equation.invars[0].aval.dtype)
    if own["exponent_bits"] < kind.nexp or own["mantissa_bits"] < kind.nmant:
        raise unsupported(graph, equation, " to fewer bits")
    return x


def _convert(graph: Graph, equation: core.JaxprEqn, x: Tensor) -> Tensor:
    return graph.add("Cast", [x], x.shape, to=_onnx_type(equation.params["new_dtype"]))


def _power(graph: Graph, equation: core.JaxprEqn, x: Tensor) -> Tensor:
    if equation.params["y"] == 2:
        return _same("Mul")(graph, equation, x, x)
    exponent = known(np.array(equation.params["y"], equation.outvars[0].aval.dtype))
    return graph.add("Pow", [x, exponent], x.shape)


def _multiply(graph: Graph, equation: core.JaxprEqn, x: Tensor, y: Tensor) -> Tensor:
    if y.value is not None and y.shape == () and y.value == np.float32(0.5**0.5):
        # In this form ONNX Runtime knows GELU, which it computes in one step.
        return _same("Div")(graph, equation, x, known(y.value.dtype.type(2**0.5)))
    return _same("Mul")(graph, equation, x, y)


def _square(graph: Graph, equation: core.JaxprEqn, x: Tensor) -> Tensor:
    return graph.add("Mul", [x, x], x.shape)


def _finite(graph: Graph, equation: core.JaxprEqn, x: Tensor) -> Tensor:
    nan, infinite = (graph.add(op, [x], x.shape) for op in ("IsNaN", "IsInf"))
    return _then("Or", "Not")(graph, equation, nan, infinite)


def _select(graph: Graph, equation: core.JaxprEqn, which: Tensor, *cases: Tensor) -> Tensor:
    if equation.invars[0].aval.dtype != bool or len(cases) != 2:
        raise unsupported(graph, equation, " of more than two cases")
    return _same("Where")(graph, equation, which, cases[1], cases[0])


def _clamp(graph: Graph, equation: core.JaxprEqn, low: Tensor, x: Tensor, high: Tensor) -> Tensor:
    return _same("Min")(graph, equation, _same("Max")(graph, equation, x, low), high)


def _one(equation: core.JaxprEqn) -> Tensor:
    return known(np.array(1, equation.outvars[0].aval.dtype))


def _erfc(graph: Graph, equation: core.JaxprEqn, x: Tensor) -> Tensor:
    return graph.add("Sub", [_one(equation), graph.add("Erf", [x], x.shape)], x.shape)


def _log1p(graph: Graph, equation: core.JaxprEqn, x: Tensor) -> Tensor:
    """Kahan's log u · x / (u − 1), where u is 1 + x as it is rounded; x where u = 1."""
    one = _one(equation)
    u = graph.add("Add", [x, one], x.shape)
    ratio = graph.add("Div", [x, graph.add("Sub", [u, one], x.shape)], x.shape)
    found = graph.add("Mul", [graph.add("Log", [u], x.shape), ratio], x.shape)
    return graph.add("Where", [graph.add("Equal", [u, one], x.shape), x, found], x.shape)


def _expm1(graph: Graph, equation: core.JaxprEqn, x: Tensor) -> Tensor:
    """tanh(x/2) · (exp x + 1), of which no step loses digits near 0."""
    half = known(np.array(0.5, equation.outvars[0].aval.dtype))
    tanh = graph.add("Tanh", [graph.add("Mul", [x, half], x.shape)], x.shape)
    more = graph.add("Add", [graph.add("Exp", [x], x.shape), _one(equation)], x.shape)
    return graph.add("Mul", [tanh, more], x.shape)


ELEMENTWISE: dict[str, Rule] = {
    **{op.lower(): _same(op) for op in ("Add", "Sub", "Div", "Max", "Min", "Pow", "Neg")},
    **{op.lower(): _same(op) for op in ("Abs", "Exp", "Log", "Sqrt", "Sign", "Floor", "Ceil")},
    **{op.lower(): _same(op) for op in ("Sin", "Cos", "Tan", "Sinh", "Cosh", "Tanh", "Erf")},
    **{op.lower(): _same(op) for op in ("Asinh", "Acosh", "Atanh", "Atan")},
    **{op.lower(): _logical(op) for op in ("And", "Or", "Not")},
    **{"logistic": _same("Sigmoid"), "eq": _same("Equal"), "ne": _then("Equal", "Not")},
    **{"lt": _same("Less"), "le": _same("LessOrEqual"), "gt": _same("Greater")},
    **{"ge": _same("GreaterOrEqual"), "rsqrt": _then("Sqrt", "Reciprocal")},
    **{"log1p": _log1p, "expm1": _expm1, "erfc": _erfc},
    **{"square": _square, "integer_pow": _power},
    **{
        "mul": _multiply,
        "convert_element_type": _convert,
        "is_finite": _finite,
        "select_n": _select,
    },
    **{"clamp": _clamp, "stop_gradient": _identity, "copy": _identity, "copy_p": _identity},
    **{"optimization_barrier": _identity, "reduce_precision": _precision},
}


# Shapes.


def _reshaped(graph: Graph, x: Tensor, shape: Shape) -> Tensor:
    if x.value is not None:
        return known(x.value.reshape(shape), x.name)
    return x if x.shape == shape else graph.add("Reshape", [x, lengths(shape)], shape)


def broadcast(graph: Graph, equation: core.JaxprEqn, x: Tensor) -> Tensor:
    """Adds axes of length 1, which `Graph.expanded` makes longer where it matters."""
    shape = [1] * len(_shape(equation))
    for axis, length in zip(equation.params["broadcast_dimensions"], x.shape, strict=True):
        shape[axis] = length
    return _reshaped(graph, x, tuple(shape))


def _reshape(graph: Graph, equation: core.JaxprEqn, x: Tensor) -> Tensor:
    return _reshaped(graph, x, _shape(equation))


def _keeps_order(x: Tensor, order: Sequence[int]) -> bool:
    """Whether a transposition moves no element, but perhaps axes of length 1."""
    long = [axis for axis in order if x.shape[axis] != 1]
    return long == sorted(long)


def _transposed(graph: Graph, x: Tensor, order: Sequence[int]) -> Tensor:
    order, shape = list(order), tuple(x.shape[axis] for axis in order)
    if x.value is not None:
        return known(np.transpose(x.value, order), x.name)
    if _keeps_order(x, order):
        return _reshaped(graph, x, shape)
    return graph.add("Transpose", [x], shape, perm=order)


def _transpose(graph: Graph, equation: core.JaxprEqn, x: Tensor) -> Tensor:
    return _transposed(graph, x, equation.params["permutation"])


def _concatenate(graph: Graph, equation: core.JaxprEqn, *inputs: Tensor) -> Tensor:
    return graph.add("Concat", inputs, _shape(equation), axis=equation.params["dimension"])


def _stack(graph: Graph, equation: core.JaxprEqn, *inputs: Tensor) -> Tensor:
    axis = equation.params["axis"]
    wider = [_reshaped(graph, x, (*x.shape[:axis], 1, *x.shape[axis:])) for x in inputs]
    return graph.add("Concat", wider, _shape(equation), axis=axis)


def _tile(graph: Graph, equation: core.JaxprEqn, x: Tensor) -> Tensor:
    times, shape = equation.params["reps"], _shape(equation)
    pairs = list(zip(x.shape, times, strict=True))
    x = graph.expanded(x, tuple(time if n == 1 else n for n, time in pairs))
    rest = integers(*(1 if n == 1 else time for n, time in pairs))
    return x if x.shape == shape else graph.add("Tile", [x, rest], shape)


def _split(graph: Graph, equation: core.JaxprEqn, x: Tensor) -> list[Tensor]:
    axis, sizes = equation.params["axis"], integers(*equation.params["sizes"])
    shapes = [each.aval.shape for each in equation.outvars]
    return graph.add_several("Split", [x, sizes], shapes, axis=axis)


def _sliced(graph: Graph, equation: core.JaxprEqn, x: Tensor, *bounds: Sequence[int]) -> Tensor:
    """Cuts a range out of each axis that is not whole; bounds are first, last and step."""
    shape = _shape(equation)
    axes = [i for i, n in enumerate(x.shape) if (bounds[0][i], bounds[1][i]) != (0, n)]
    axes += [i for i, step in enumerate(bounds[2]) if step != 1 and i not in axes]
    if not axes:
        return x
    first, last, step = (integers(*(int(bound[i]) for i in axes)) for bound in bounds)
    return graph.add("Slice", [x, first, last, integers(*axes), step], shape)


def _slice(graph: Graph, equation: core.JaxprEqn, x: Tensor) -> Tensor:
    own = equation.params
    steps = own["strides"] or [1] * len(x.shape)
    return _sliced(graph, equation, x, own["start_indices"], own["limit_indices"], steps)


def _dynamic_slice(graph: Graph, equation: core.JaxprEqn, x: Tensor, *starts: Tensor) -> Tensor:
    if any(start.value is None for start in starts):
        raise unsupported(graph, equation, " at a place that depends on the image")
    sizes = equation.params["slice_sizes"]
    most = (n - size for n, size in zip(x.shape, sizes, strict=True))
    first = [min(max(int(s.value), 0), m) for s, m in zip(starts, most, strict=True)]
    last = [start + size for start, size in zip(first, sizes, strict=True)]
    return _sliced(graph, equation, x, first, last, [1] * len(first))


def _reverse(graph: Graph, equation: core.JaxprEqn, x: Tensor) -> Tensor:
    axes = equation.params["dimensions"]
    if any(counts_images(x.shape[axis]) for axis in axes):
        raise graph.mixing("rev across images")
    first, last, step = (integers(*[each] * len(axes)) for each in (-1, -(2**31), -1))
    return graph.add("Slice", [x, first, last, integers(*axes), step], x.shape)


def _pad(graph: Graph, equation: core.JaxprEqn, x: Tensor, value: Tensor) -> Tensor:
    low, high, inside = zip(*equation.params["padding_config"], strict=True)
    if any(inside):
        raise unsupported(graph, equation, " between the elements")
    return graph.add("Pad", [x, integers(*low, *high), value], _shape(equation))


def _gather(graph: Graph, equation: core.JaxprEqn, x: Tensor, indices: Tensor) -> Tensor:
    """What `take_along_axis` and an index of one axis, as in x[:, 0], become.

    ONNX counts negative indices from the end and refuses those outside; JAX takes the nearest one
    inside, or a value that says that there is none.
    """
    numbers, shape = equation.params["dimension_numbers"], _shape(equation)
    axes, sizes = numbers.start_index_map, list(equation.params["slice_sizes"])
    if len(axes) != 1 or tuple(numbers.collapsed_slice_dims) != tuple(axes):
        raise unsupported(graph, equation, " of several axes")
    (axis,) = axes
    if counts_images(x.shape[axis]):
        raise graph.mixing("gather across images")
    others = tuple(i for i in range(len(x.shape)) if i != axis)
    if numbers.operand_batching_dims == others == numbers.start_indices_batching_dims:
        op, places = "GatherElements", _reshaped(graph, indices, indices.shape[:-1])
    elif indices.shape == (1,) and all(sizes[i] == x.shape[i] for i in others):
        op, places = "Gather", _reshaped(graph, indices, ())
    else:
        raise unsupported(graph, equation, " of such indices")
    places = graph.add("Cast", [places], places.shape, to=_onnx_type(np.int64))
    bounds = known(np.int64(0)), known(np.int64(x.shape[axis] - 1))
    inside = graph.add("Clip", [places, *bounds], places.shape)
    found = graph.add(op, [x, inside], shape, axis=axis)
    if equation.params["mode"] != lax.GatherScatterMode.FILL_OR_DROP:
        return found
    fill, dtype = equation.params["fill_value"], equation.outvars[0].aval.dtype
    if fill is None and dtype.kind != "f":
        raise unsupported(graph, equation, " of integers, perhaps outside of the array")
    is_inside = graph.add("Equal", [places, inside], places.shape)
    value = known(np.array(np.nan if fill is None else fill, dtype))
    return graph.add("Where", [is_inside, found, value], shape)


# Sums and products.


def _reduce(op: str) -> Rule:
    def rule(graph: Graph, equation: core.JaxprEqn, x: Tensor) -> Tensor:
        axes = equation.params["axes"]
        if not axes:
            return x
        return graph.add(op, [x, integers(*axes)], _shape(equation), keepdims=0)

    return rule


def _index_of(op: str) -> Rule:
    def rule(graph: Graph, equation: core.JaxprEqn, x: Tensor) -> Tensor:
        (axis,) = equation.params["axes"]
        found = graph.add(op, [x], _shape(equation), axis=axis, keepdims=0)
        dtype = _onnx_type(equation.params["index_dtype"])
        return graph.add("Cast", [found], found.shape, to=dtype)

    return rule


class _Factor(NamedTuple):
    """A factor of a product: its axes of batches, those that stay, and those that are summed."""

    x: Tensor
    batch: tuple[int, ...]
    own: tuple[int, ...]
    summed: tuple[int, ...]

    @classmethod
    def of(cls, x: Tensor, batch: Sequence[int], summed: Sequence[int]) -> Self:
        own = (i for i in range(len(x.shape)) if i not in (*batch, *summed))
        return cls(x, tuple(batch), tuple(own), tuple(summed))

    def sizes(self, axes: Sequence[int]) -> list[int]:
        return [self.x.shape[axis] for axis in axes]

    def moved(self, order: tuple[int, ...]) -> int:
        """How many elements a transposition into an order moves; a constant's cost nothing."""
        still = self.x.value is not None or _keeps_order(self.x, order)
        return 0 if still else math.prod(self.x.shape)

    @property
    def as_left(self) -> tuple[int, ...]:
        return (*self.batch, *self.own, *self.summed)

    @property
    def as_right(self) -> tuple[int, ...]:
        return (*self.batch, *self.summed, *self.own)


def _product(graph: Graph, equation: core.JaxprEqn, x: Tensor, y: Tensor) -> Tensor:
    """A product of matrices, in the order of factors that transposes fewer elements."""
    (x_summed, y_summed), (x_batch, y_batch) = equation.params["dimension_numbers"]
    dtype = equation.outvars[0].aval.dtype
    # Sums of half precision that are asked for in float32 are products of float32.
    x, y = (
        each
        if own.aval.dtype == dtype
        else graph.add("Cast", [each], each.shape, to=_onnx_type(dtype))
        for each, own in zip((x, y), equation.invars, strict=True)
    )
    left, right = _Factor.of(x, x_batch, x_summed), _Factor.of(y, y_batch, y_summed)
    batches, shape = len(x_batch), _shape(equation)
    straight = left.moved(left.as_left) + right.moved(right.as_right)
    swapped = right.moved(right.as_left) + left.moved(left.as_right) + math.prod(shape)
    if straight <= swapped:
        return _matmul(graph, left, right, shape)
    order = (*range(batches), *range(batches + len(left.own), len(shape)))
    order += tuple(range(batches, batches + len(left.own)))
    found = _matmul(graph, right, left, tuple(shape[i] for i in order))
    return _transposed(graph, found, np.argsort(order).tolist())


def _matmul(graph: Graph, left: _Factor, right: _Factor, shape: Shape) -> Tensor:
    batch, rows = left.sizes(left.batch), left.sizes(left.own)
    inner, columns = math.prod(left.sizes(left.summed)), right.sizes(right.own)
    if batch or len(columns) != 1:  # Otherwise all axes of the left factor may stay.
        rows, columns = [math.prod(rows)], [math.prod(columns)]
    x = _reshaped(graph, _transposed(graph, left.x, left.as_left), (*batch, *rows, inner))
    y = _reshaped(graph, _transposed(graph, right.x, right.as_right), (*batch, inner, *columns))
    found = graph.add("MatMul", [x, y], (*batch, *rows, *columns))
    return _reshaped(graph, found, shape)


def _convolution(graph: Graph, equation: core.JaxprEqn, x: Tensor, kernel: Tensor) -> Tensor:
    own = equation.params
    if any(n != 1 for n in own["lhs_dilation"]) or own["batch_group_count"] != 1:
        raise unsupported(graph, equation, " with spread images or groups of images")
    if any(n < 0 for pair in own["padding"] for n in pair):
        raise unsupported(graph, equation, " with negative padding")
    numbers = own["dimension_numbers"]
    x = _transposed(graph, x, numbers.lhs_spec)
    kernel = _transposed(graph, kernel, numbers.rhs_spec)
    before, after = zip(*own["padding"], strict=True)
    order = numbers.out_spec
    shape = tuple(_shape(equation)[axis] for axis in order)
    found = graph.add(
        "Conv",
        [x, kernel],
        shape,
        strides=own["window_strides"],
        pads=[*before, *after],
        dilations=own["rhs_dilation"],
        group=own["feature_group_count"],
    )
    return _transposed(graph, found, np.argsort(order).tolist())


def _pool(op: str) -> Rule:
    """The rule of pooling over the two middle axes of [batch, height, width, channels]."""

    def rule(graph: Graph, equation: core.JaxprEqn, x: Tensor) -> Tensor:
        own = equation.params
        window, strides = own["window_dimensions"], own["window_strides"]
        padding = own["padding"]
        whole = len(window) == 4 and all(
            (window[i], strides[i], tuple(padding[i])) == (1, 1, (0, 0)) for i in (0, 3)
        )
        if not whole or any(n != 1 for n in (*own["base_dilation"], *own["window_dilation"])):
            raise unsupported(graph, equation, " of such windows")
        if not all(0 <= n < window[i] for i in (1, 2) for n in padding[i]):
            raise unsupported(graph, equation, " with padding that is negative or fills windows")
        pads = [padding[i][end] for end in (0, 1) for i in (1, 2)]
        options = {"kernel_shape": window[1:3], "strides": strides[1:3], "pads": pads}
        options |= {"count_include_pad": 1} if op == "AveragePool" else {}
        shape = tuple(_shape(equation)[i] for i in (0, 3, 1, 2))
        found = graph.add(op, [_transposed(graph, x, (0, 3, 1, 2))], shape, **options)
        if op == "AveragePool":  # The sum is asked for.
            number = known(np.array(math.prod(window), equation.outvars[0].aval.dtype))
            found = graph.add("Mul", [found, number], shape)
        return _transposed(graph, found, (0, 2, 3, 1))

    return rule


RULES: dict[str, Rule] = {
    **{"reshape": _reshape, "squeeze": _reshape, "expand_dims": _reshape, "stack": _stack},
    **{"transpose": _transpose, "concatenate": _concatenate, "tile": _tile, "split": _split},
    **{"slice": _slice, "dynamic_slice": _dynamic_slice, "rev": _reverse, "pad": _pad},
    **{"gather": _gather, "argmax": _index_of("ArgMax"), "argmin": _index_of("ArgMin")},
    **{f"reduce_{op.lower()}": _reduce(f"Reduce{op}") for op in ("Max", "Min", "Prod", "Sum")},
    **{"dot_general": _product, "conv_general_dilated": _convolution},
    **{"reduce_window_max": _pool("MaxPool"), "reduce_window_sum": _pool("AveragePool")},
}
