"""ONNX's products of matrices, convolutions and maxima of windows, as `onnx_rules` has them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from hypjax.integrations.onnx_graph import Graph, Tensor, UntranslatedError, Value

Params = Mapping[str, Any]


class _Factor(NamedTuple):
    """A factor of a product, and its axes: of the batch, those of the result, those summed over."""

    value: Value
    batch: Sequence[int]
    free: Sequence[int]
    sums: Sequence[int]

    def moved(self, *groups: Sequence[int]) -> int:
        """Elements that are moved if the axes are arranged by groups."""
        axes = tuple(axis for group in groups for axis in group)
        if isinstance(self.value, np.ndarray) or not self.value.moves(axes):
            return 0
        return math.prod(n for n in self.value.shape if isinstance(n, int))

    def matrix(self, graph: Graph, *groups: Sequence[int]) -> str:
        """The name of matrices, in batches, whose rows and columns are groups of axes."""
        name = graph.ordered(self.value, [*self.batch, *groups[0], *groups[1]])
        if all(len(group) == 1 for group in groups):
            return name
        batch, *sizes = ([self.value.shape[i] for i in x] for x in (self.batch, *groups))
        return graph.reshaped(name, [*batch, *map(math.prod, sizes)], self.value).name


def dot_general(graph: Graph, params: Params, outputs: list, x: Value, y: Value) -> Tensor:
    """A product of matrices, in batches; by a constant matrix, also of channels in images."""
    (sums, batches), out = params["dimension_numbers"], outputs[0]
    first, second = (
        _Factor(value, batch, sorted({*range(len(value.shape))} - {*summed, *batch}), summed)
        for value, summed, batch in zip((x, y), sums, batches, strict=True)
    )
    rank, batch_rank, first_rank = len(out.shape), len(first.batch), len(first.free)
    moved, moved_if_swapped = (
        a.moved(a.batch, a.free, a.sums) + b.moved(b.batch, b.sums, b.free)
        for a, b in ((first, second), (second, first))
    )
    is_constant = isinstance(x, np.ndarray) and not batch_rank
    # Attention's matrix of probabilities is not to be transposed, and constants come second.
    if is_constant or (batch_rank and moved_if_swapped < moved):
        axes = [*range(batch_rank), *range(batch_rank + first_rank, rank)]
        axes += range(batch_rank, batch_rank + first_rank)
        like = jax.ShapeDtypeStruct([out.shape[axis] for axis in axes], out.dtype)
        product = _matrix_product(graph, second, first, like)
        return product._replace(order=tuple(axes[i] for i in product.order), shape=tuple(out.shape))
    return _matrix_product(graph, first, second, out)


def _matrix_product(graph: Graph, first: _Factor, second: _Factor, out: Any) -> Tensor:
    """The product of two factors, whose axes are the batch's, the first's and the second's."""
    x, y = first.value, second.value
    is_matrix = (len(second.batch), len(second.free), len(second.sums)) == (0, 1, 1)
    if isinstance(y, np.ndarray) and is_matrix:
        (channels,) = first.sums
        if isinstance(x, Tensor) and len(x.shape) == 4 and x.order[1] == channels:
            kernel = np.transpose(y, (*second.free, *second.sums))[:, :, None, None]
            order = [3 if axis == channels else first.free.index(axis) for axis in x.order]
            return graph.add("Conv", [x.name, graph.constant(kernel, y.dtype)], out, order)
        rows = graph.ordered(x, (*first.free, channels))
        columns = graph.ordered(y, (*second.sums, *second.free))
        return graph.add("MatMul", [rows, columns], out)
    rows = first.matrix(graph, first.free, first.sums)
    columns = second.matrix(graph, second.sums, second.free)
    product = graph.add("MatMul", [rows, columns], out)
    if len(first.free) == len(second.free) == 1:
        return product
    return graph.reshaped(product.name, out.shape, out)


def convolution(graph: Graph, params: Params, outputs: list, x: Tensor, kernel: Value) -> Tensor:
    """A convolution of images, whose channels come first in ONNX."""
    numbers, padding = params["dimension_numbers"], params["padding"]
    if {*params["lhs_dilation"], params["batch_group_count"]} != {1}:
        raise UntranslatedError("it uses a transposed convolution")
    if any(end < 0 for side in padding for end in side):
        raise UntranslatedError("it crops in a convolution")
    return graph.add(
        "Conv",
        [graph.ordered(x, numbers.lhs_spec), graph.ordered(kernel, numbers.rhs_spec)],
        outputs[0],
        numbers.out_spec,
        group=params["feature_group_count"],
        strides=params["window_strides"],
        dilations=params["rhs_dilation"],
        pads=[side[end] for end in (0, 1) for side in padding],
    )


def max_pool(graph: Graph, params: Params, outputs: list, x: Tensor) -> Tensor:
    """A maximum over windows of images, channels last."""
    window, padding, order = params["window_dimensions"], params["padding"], (0, 3, 1, 2)
    dilated = {*params["base_dilation"], *params["window_dilation"]} != {1}
    others = [(window[i], params["window_strides"][i], *padding[i]) for i in (0, -1)]
    if len(window) != 4 or others != 2 * [(1, 1, 0, 0)] or dilated:
        raise UntranslatedError("it uses windows that are not of images")
    return graph.add(
        "MaxPool",
        [graph.ordered(x, order)],
        outputs[0],
        order,
        kernel_shape=window[1:3],
        strides=params["window_strides"][1:3],
        pads=[padding[axis][end] for end in (0, 1) for axis in (1, 2)],
    )
