"""Translates functions of JAX to ONNX: `translate` adds operations by `RULES` for primitives.

A rule takes the graph, the equation's parameters, the shapes of its outputs, and its inputs.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import onnx
from onnx import TensorProto, helper

from hypjax.integrations.onnx_graph import TYPES, Graph, Reduction, Tensor, UntranslatedError, Value
from hypjax.integrations.onnx_products import Params, convolution, dot_general, max_pool

_OPSET, _IR_VERSION = 18, 8  # The first Resize with antialiasing, and the format of that time.
_LARGEST = 2**31 - 2**22  # Bytes of weights: a protocol buffer holds 2 GB, its nodes included.


def _elementwise(graph: Graph, kind: str, like: Any, *inputs: Value) -> Tensor:
    """Adds an operation on elements, which broadcasts axes of size 1.

    The result has its axes in the order of the largest tensor.
    """
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    order = max(tensors, key=lambda x: sum(n != 1 for n in x.shape)).order
    names = [graph.ordered(x, order if len(x.shape) else ()) for x in inputs]
    return graph.add(kind, names, like, order)


def _simple(kind: str, *then: str) -> Callable[..., Tensor]:
    """The rule of an operation on elements, and of others on its result."""

    def rule(graph: Graph, _: Params, outputs: list, *inputs: Value) -> Tensor:
        result = _elementwise(graph, kind, outputs[0], *inputs)
        for other in then:
            result = _elementwise(graph, other, outputs[0], result)
        return result

    return rule


def _like(x: Tensor, number: float) -> np.ndarray:
    return np.array(number, x.dtype)


def _sum(graph: Graph, _: Params, outputs: list, x: Value, y: Value) -> Value:
    """X + y; x, where y is a bias of zeros."""
    for total, term in ((x, y), (y, x)):
        is_zero = isinstance(term, np.ndarray) and not term.any()
        if is_zero and tuple(total.shape) == tuple(outputs[0].shape):
            return total
    return _elementwise(graph, "Add", outputs[0], x, y)


def _product(graph: Graph, _: Params, outputs: list, x: Value, y: Value) -> Tensor:
    """x·y; by y = 1/√v a quotient, as runtimes expect it in a LayerNorm."""
    for other, factor in ((x, y), (y, x)):
        if isinstance(factor, Tensor) and graph.kind(factor.name) == "Reciprocal":
            root = factor._replace(name=graph.made_by[factor.name].input[0])
            return _elementwise(graph, "Div", outputs[0], other, root)
    return _elementwise(graph, "Mul", outputs[0], x, y)


def _power(graph: Graph, params: Params, outputs: list, x: Tensor) -> Tensor:
    exponent = params.get("y", 2)
    if exponent == 2:
        return _elementwise(graph, "Mul", x, x, x)
    return _elementwise(graph, "Pow", x, x, _like(x, exponent))


def _erf(graph: Graph, _: Params, outputs: list, x: Tensor) -> Tensor:
    """The error function; of a product by 1/√2 as a quotient, as runtimes expect it in a GELU."""
    if graph.kind(x.name) == "Mul":
        factors = graph.made_by[x.name].input
        for other, factor in (factors, factors[::-1]):
            if abs(graph.number(factor) - math.sqrt(0.5)) < 1e-6:
                root = graph.constant(math.sqrt(2), x.dtype)
                x = graph.add("Div", [other, root], x, x.order)
                break
    return _elementwise(graph, "Erf", outputs[0], x)


def _log1p(graph: Graph, _: Params, outputs: list, x: Tensor) -> Tensor:
    """2·atanh(x / (2 + x)), which keeps the digits of small numbers; log(1 + x) of larger ones."""
    add = functools.partial(_elementwise, graph)
    ratio = add("Div", x, x, add("Add", x, x, _like(x, 2)))
    small = add("Mul", x, add("Atanh", x, ratio), _like(x, 2))
    large = add("Log", x, add("Add", x, x, _like(x, 1)))
    is_small = add("Less", jax.ShapeDtypeStruct(x.shape, np.bool_), x, _like(x, 1))
    return add("Where", x, is_small, small, large)


def _expm1(graph: Graph, _: Params, outputs: list, x: Tensor) -> Tensor:
    """tanh(x/2)·(eˣ + 1), which keeps the digits of small numbers."""
    add = functools.partial(_elementwise, graph)
    tanh = add("Tanh", x, add("Mul", x, x, _like(x, 0.5)))
    return add("Mul", x, tanh, add("Add", x, add("Exp", x, x), _like(x, 1)))


def _is_finite(graph: Graph, _: Params, outputs: list, x: Tensor) -> Tensor:
    size = _elementwise(graph, "Abs", x, x)
    return _elementwise(graph, "LessOrEqual", outputs[0], size, np.array(np.finfo(x.dtype).max))


def _cast(graph: Graph, params: Params, outputs: list, x: Tensor) -> Tensor:
    dtype = np.dtype(params["new_dtype"])
    if dtype == x.dtype:
        return x
    if dtype not in TYPES:
        raise UntranslatedError(f"it computes in {dtype}")
    if dtype.kind in "iu" and not np.can_cast(x.dtype, dtype):  # ONNX defines no numbers too large.
        raise UntranslatedError(f"it makes {dtype} of {x.dtype}")
    return graph.add("Cast", [x.name], outputs[0], x.order, to=TYPES[dtype])


def _select(graph: Graph, _: Params, outputs: list, which: Value, *cases: Value) -> Value:
    if len(cases) != 2 or which.dtype != np.bool_:
        raise UntranslatedError("it selects one of several cases")
    if isinstance(which, np.ndarray) and not which.shape:  # NaN, in a variance of no numbers.
        return cases[int(which)]
    return _elementwise(graph, "Where", outputs[0], which, cases[1], cases[0])


def _clamp(graph: Graph, _: Params, outputs: list, low: Value, x: Tensor, high: Value) -> Tensor:
    if low.shape or high.shape:
        return _elementwise(graph, "Min", x, _elementwise(graph, "Max", x, x, low), high)
    return graph.add("Clip", [x.name, graph.ordered(low), graph.ordered(high)], x, x.order)


def _transpose(_: Graph, params: Params, outputs: list, x: Tensor) -> Tensor:
    """A transposition, which moves nothing: only the names of the axes change."""
    permutation = [*params["permutation"]]
    order = tuple(permutation.index(axis) for axis in x.order)
    return x._replace(order=order, shape=tuple(outputs[0].shape))


def _reshape(graph: Graph, _: Params, outputs: list, x: Tensor) -> Tensor:
    return graph.reshaped(graph.ordered(x), outputs[0].shape, outputs[0])


def _broadcast(graph: Graph, params: Params, outputs: list, x: Value, *_: Value) -> Tensor:
    """Inserts axes of size 1, and repeats the values along axes that grow."""
    (out,) = outputs
    sizes = dict(zip(params["broadcast_dimensions"], x.shape, strict=True))
    shape = tuple(sizes.get(axis, 1) for axis in range(len(out.shape)))
    like = jax.ShapeDtypeStruct(shape, x.dtype)
    reduction = graph.reductions.get(x) if isinstance(x, Tensor) else None
    if reduction and shape == reduction.kept_shape:
        result = _reduction(graph, reduction._replace(keeps=True), like)
    else:
        result = graph.reshaped(graph.ordered(x), shape, like)
    if shape == tuple(out.shape):
        return result
    return graph.add("Expand", [result.name, graph.shape(out.shape)], out)


def _tile(graph: Graph, params: Params, outputs: list, x: Tensor) -> Tensor:
    counts = graph.constant([params["reps"][axis] for axis in x.order])
    return graph.add("Tile", [x.name, counts], outputs[0], x.order)


def _window(
    graph: Graph, x: Tensor, out: Any, starts: Sequence, ends: Sequence, steps: Sequence[int]
) -> Tensor:
    """The values from `starts` to `ends` along each axis; the batch stays whole."""
    ranges = zip(starts, ends, steps, x.shape, strict=True)
    cut = [
        i for i, (start, end, step, size) in enumerate(ranges) if (start, end, step) != (0, size, 1)
    ]
    axes = [x.order.index(axis) for axis in cut]
    values = [graph.constant([row[axis] for axis in cut]) for row in (starts, ends)]
    values += [graph.constant(axes), graph.constant([steps[axis] for axis in cut])]
    return graph.add("Slice", [x.name, *values], out, x.order) if cut else x


def _slice(graph: Graph, params: Params, outputs: list, x: Tensor) -> Tensor:
    starts, ends = params["start_indices"], params["limit_indices"]
    return _window(graph, x, outputs[0], starts, ends, params["strides"] or [1] * len(starts))


def _split(graph: Graph, params: Params, outputs: list, x: Tensor) -> list[Tensor]:
    axis, start, results = params["axis"], 0, []
    for out in outputs:
        starts, ends = [0] * len(x.shape), [*x.shape]
        starts[axis], ends[axis] = start, start + out.shape[axis]
        results.append(_window(graph, x, out, starts, ends, [1] * len(starts)))
        start = ends[axis]
    return results


def _concatenate(graph: Graph, params: Params, outputs: list, *inputs: Value) -> Tensor:
    order = next(x.order for x in inputs if isinstance(x, Tensor))
    names = [graph.ordered(x, order) for x in inputs]
    return graph.add("Concat", names, outputs[0], order, axis=order.index(params["dimension"]))


def _stack(graph: Graph, params: Params, outputs: list, *inputs: Value) -> Tensor:
    axis = params["axis"]
    shape = (*outputs[0].shape[:axis], 1, *outputs[0].shape[axis + 1 :])
    rows = (graph.reshaped(graph.ordered(x), shape, outputs[0]) for x in inputs)
    return graph.add("Concat", [row.name for row in rows], outputs[0], axis=axis)


def _pad(graph: Graph, params: Params, outputs: list, x: Value, value: Value) -> Tensor:
    config = params["padding_config"]
    order = x.order if isinstance(x, Tensor) else range(x.ndim)
    if any(between for _, _, between in config):
        raise UntranslatedError("it pads between elements")
    pads = graph.constant([config[axis][end] for end in (0, 1) for axis in order])
    return graph.add(
        "Pad", [graph.ordered(x, order), pads, graph.ordered(value)], outputs[0], order
    )


def _reduce(kind: str) -> Callable[..., Tensor]:
    def rule(graph: Graph, params: Params, outputs: list, x: Tensor) -> Tensor:
        axes = tuple(params["axes"])
        if not axes:  # Which ONNX takes for all.
            return x
        if kind != "ArgMax":
            return _reduction(graph, Reduction(kind, x, axes), outputs[0])
        order, (axis,) = _without(x.order, axes), axes
        found = graph.add(kind, [x.name], outputs[0], order, axis=x.order.index(axis), keepdims=0)
        return graph.add("Cast", [found.name], outputs[0], order, to=TYPES[found.dtype])

    return rule


def _without(order: Sequence[int], removed: Sequence[int]) -> list[int]:
    """The order of the axes that stay."""
    kept = sorted({*order} - {*removed})
    return [kept.index(axis) for axis in order if axis in kept]


def _reduction(graph: Graph, reduction: Reduction, like: Any) -> Tensor:
    """Adds a reduction, and keeps it, since later equations may change what it computes."""
    kind, x, axes, keeps = reduction
    order = x.order if keeps else _without(x.order, axes)
    stored = graph.constant([x.order.index(axis) for axis in axes])
    result = graph.add(kind, [x.name, stored], like, order, keepdims=int(keeps))
    graph.reductions[result] = reduction
    return result


def _quotient(graph: Graph, _: Params, outputs: list, x: Value, y: Value) -> Tensor:
    """A quotient: a mean, if x is a sum of y terms; a softmax, if y is the sum of x = exp(v)."""
    x_sum, y_sum = (
        graph.reductions.get(value) if isinstance(value, Tensor) else None for value in (x, y)
    )
    if x_sum and x_sum.kind == "ReduceSum" and isinstance(y, np.ndarray) and y.size == 1:
        terms = [x_sum.x.shape[axis] for axis in x_sum.axes]
        if all(isinstance(n, int) for n in terms) and math.prod(terms) == y.item():
            return _reduction(graph, x_sum._replace(kind="ReduceMean"), outputs[0])
    if isinstance(x, Tensor) and y_sum and (y_sum.kind, y_sum.x) == ("ReduceSum", x):
        if y_sum.keeps and len(y_sum.axes) == 1 and graph.kind(x.name) == "Exp":
            axis = x.order.index(y_sum.axes[0])
            given = _exponents(graph, x, axis)
            return graph.add("Softmax", [given], outputs[0], x.order, axis=axis)
    return _elementwise(graph, "Div", outputs[0], x, y)


def _exponents(graph: Graph, x: Tensor, axis: int) -> str:
    """The v of x = exp(v), or of exp(v - w) where w does not vary along a stored axis."""
    given = graph.made_by[x.name].input[0]
    if graph.kind(given) == "Sub":
        v, w = (graph.tensors.get(name) for name in graph.made_by[given].input)
        if v and w and v.stored == x.stored and len(w.stored) > axis and w.stored[axis] == 1:
            return v.name
    return given


def _gather(graph: Graph, params: Params, outputs: list, x: Value, indices: Value) -> Tensor:
    """What `x[:, 0]`, `jnp.take(x, indices, 0)` and `jnp.take_along_axis` compute.

    The latter's indices, which JAX checks, must be valid.
    """
    numbers, sizes, (out,) = params["dimension_numbers"], tuple(params["slice_sizes"]), outputs
    axes, batch = tuple(numbers.start_index_map), tuple(numbers.operand_batching_dims)
    collapsed, clips = tuple(numbers.collapsed_slice_dims), "CLIP" in str(params["mode"])
    if isinstance(indices, np.ndarray) and indices.ndim == 1 and isinstance(x, Tensor):
        return _gather_at(graph, x, dict(zip(axes, indices.tolist(), strict=True)), sizes, out)
    names = [graph.ordered(x), graph.ordered(indices)]
    if len(axes) == 1 and collapsed == axes and sizes[axis := axes[0]] == 1:
        if (axis, batch, sizes[1:]) == (0, (), tuple(x.shape[1:])) and clips:
            ends = [graph.constant(end, indices.dtype) for end in (0, x.shape[0] - 1)]
            rows = graph.reshaped(names[1], indices.shape[:-1], indices)
            like = jax.ShapeDtypeStruct(rows.shape, rows.dtype)
            rows = graph.add("Clip", [rows.name, *ends], like)
            return graph.add("Gather", [names[0], rows.name], out, axis=0)
        if batch and batch == tuple(numbers.start_indices_batching_dims):
            if {*sizes} == {1}:
                places = graph.reshaped(names[1], indices.shape[:-1], indices)
                return graph.add("GatherElements", [names[0], places.name], out, axis=axis)
            if (axis, batch, sizes[2:]) == (1, (0,), tuple(x.shape[2:])):
                whole = graph.add("Cast", names[1:], indices, to=TensorProto.INT64)
                return graph.add("GatherND", [names[0], whole.name], out, batch_dims=1)
    raise UntranslatedError("it uses indices in a way of its own")


def _gather_at(
    graph: Graph, x: Tensor, at: Mapping[int, int], sizes: Sequence[Any], out: Any
) -> Tensor:
    """A window that begins at constant places along some axes."""
    if any(not 0 <= start <= x.shape[axis] - sizes[axis] for axis, start in at.items()):
        raise UntranslatedError("it uses indices beyond the ends")
    starts = [at.get(axis, 0) for axis in range(len(sizes))]
    ends = [start + size for start, size in zip(starts, sizes, strict=True)]
    steps = [1] * len(sizes)
    window = _window(graph, x, jax.ShapeDtypeStruct(sizes, x.dtype), starts, ends, steps)
    return graph.reshaped(graph.ordered(window), out.shape, out)


def _logical(kind: str) -> Callable[..., Tensor]:
    def rule(graph: Graph, _: Params, outputs: list, *inputs: Value) -> Tensor:
        if outputs[0].dtype != np.bool_:
            raise UntranslatedError("it computes with bits")
        return _elementwise(graph, kind, outputs[0], *inputs)

    return rule


_SAME_NAMES = "abs acosh asinh atanh cos cosh exp floor log max min neg pow sign sin"
_SAME_NAMES += " sinh sqrt sub tan tanh"
_COMPARISONS = {"eq": "Equal", "ge": "GreaterOrEqual", "gt": "Greater", "le": "LessOrEqual"}
_COMPARISONS |= {"lt": "Less"}
RULES: dict[str, Callable[..., Value | list[Tensor]]] = {
    **{name: _simple(name.title()) for name in _SAME_NAMES.split()},
    **{name: _simple(kind) for name, kind in _COMPARISONS.items()},
    **{name: _logical(name.title()) for name in ("and", "not", "or")},
    **{f"reduce_{x}": _reduce(f"Reduce{x.title()}") for x in ("max", "min", "sum")},
    **{"integer_pow": _power, "square": _power, "reshape": _reshape, "squeeze": _reshape},
    "add": _sum,
    "argmax": _reduce("ArgMax"),
    "broadcast_in_dim": _broadcast,
    "clamp": _clamp,
    "concatenate": _concatenate,
    "conv_general_dilated": convolution,
    "convert_element_type": _cast,
    "div": _quotient,
    "dot_general": dot_general,
    "erf": _erf,
    "expm1": _expm1,
    "gather": _gather,
    "is_finite": _is_finite,
    "log1p": _log1p,
    "logistic": _simple("Sigmoid"),
    "mul": _product,
    "ne": _simple("Equal", "Not"),
    "pad": _pad,
    "reduce_window_max": max_pool,
    "rsqrt": _simple("Sqrt", "Reciprocal"),
    "select_n": _select,
    "slice": _slice,
    "split": _split,
    "stack": _stack,
    "tile": _tile,
    "transpose": _transpose,
}


def _channels_first(graph: Graph) -> Tensor:
    """The input; of images' bytes with channels first.

    OpenVINO scales and shifts bytes some six times slower with three channels last.
    """
    given, order = graph.input, (0, 3, 1, 2)
    if given.dtype != np.uint8 or len(given.shape) != 4:
        return given
    return given._replace(name=graph.ordered(given, order), order=order)


def translate(
    function: Callable[[Any], Any], example: jax.ShapeDtypeStruct, name: str, output: str
) -> onnx.ModelProto:
    """Translates a function of a batch, of any size, to an ONNX model.

    Args:
        function: From an array [batch, ...] to an array [batch, ...].
        example: Shape and dtype of one element of the batch.
        name: Name of the model's input.
        output: Name of the model's output.

    Raises:
        UntranslatedError: With the reason, if the translation does not know an operation, the
            function does not leave the size of the batch open, or the weights are too large.
    """
    shape, dtype = (*jax.export.symbolic_shape("batch"), *example.shape), np.dtype(example.dtype)
    try:
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            closed = jax.make_jaxpr(function)(jax.ShapeDtypeStruct(shape, dtype))
            graph = Graph(Tensor(name, tuple(range(len(shape))), shape, dtype), RULES)
            (result,) = graph.run(closed.jaxpr, closed.consts, [_channels_first(graph)])
    except (TypeError, ValueError) as error:  # Of a function that needs to know the batch's size.
        raise UntranslatedError(str(error).partition("\n")[0]) from error
    graph.node(output, "Identity", [graph.ordered(result)])
    aval: Any = closed.out_avals[0]
    ends = [(name, dtype, shape), (output, np.dtype(aval.dtype), aval.shape)]
    given, returned = (
        helper.make_tensor_value_info(name, TYPES[dtype], ["batch", *shape[1:]])
        for name, dtype, shape in ends
    )
    nodes, constants = graph.used(output)
    if (size := sum(len(x.raw_data) for x in constants)) >= _LARGEST:
        raise UntranslatedError(f"an ONNX file holds 2 GB; the weights take {size / 1e9:.1f} GB")
    proto = helper.make_graph(nodes, "hypjax", [given], [returned], constants)
    opset = helper.make_opsetid("", _OPSET)
    return helper.make_model(proto, opset_imports=[opset], ir_version=_IR_VERSION)
