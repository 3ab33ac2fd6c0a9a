"""The graph of an ONNX model, to which a jaxpr is added equation by equation.

What depends on no input is computed at once: weights with the norms that are folded into them, for
instance. Axes are transposed only where an operation needs another order than its input has, so
that convolutions, channels first in ONNX, follow one another without a transposition.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import onnx
from jax.extend import core
from jax.typing import DTypeLike
from onnx import TensorProto, helper, numpy_helper

TYPES = {np.dtype(np.bool_): TensorProto.BOOL, np.dtype(np.uint8): TensorProto.UINT8}
TYPES |= {np.dtype(np.int32): TensorProto.INT32, np.dtype(np.float32): TensorProto.FLOAT}
_SMALL = 64  # Elements of constants that are stored once, however often they occur.
_LONGEST = 32  # Steps of a loop that is unrolled.
# Equations that apply another jaxpr, and those that return their inputs.
_CALLS = {"jit", "pjit", "closed_call", "remat2", "checkpoint"}
_CALLS |= {"custom_jvp_call", "custom_vjp_call"}
_IDENTITIES = {"stop_gradient", "optimization_barrier", "copy", "copy_p", "layout_constraint"}
# Constants that NumPy computes: XLA would compile a program for each shape.
_IN_NUMPY: dict[str, Callable[..., np.ndarray]] = {
    **{"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide},
    "rsqrt": lambda x: 1 / np.sqrt(x),
}


class UntranslatedError(Exception):
    """A function does what ONNX, or this translation, cannot express; the message says what."""


class Tensor(NamedTuple):
    """A value of the graph, whose axis i is axis `order[i]` of JAX's value."""

    name: str
    order: tuple[int, ...]
    shape: tuple[Any, ...]  # Of JAX's value; the size of the batch is a symbol.
    dtype: np.dtype

    @property
    def stored(self) -> list[Any]:
        """The shape in the graph."""
        return [self.shape[axis] for axis in self.order]

    def moves(self, order: Sequence[int]) -> bool:
        """Whether another order of axes moves elements: axes of size 1 do not count."""
        orders = ([axis for axis in x if self.shape[axis] != 1] for x in (order, self.order))
        return next(orders) != next(orders)


class Reduction(NamedTuple):
    """A reduction of a tensor along some of its axes in JAX."""

    kind: str
    x: Tensor
    axes: tuple[int, ...]
    keeps: bool = False  # Whether the axes stay, with size 1.

    @property
    def kept_shape(self) -> tuple[Any, ...]:
        """The shape of the result if the axes stay."""
        return tuple(1 if i in self.axes else size for i, size in enumerate(self.x.shape))


Value = Tensor | np.ndarray  # Arrays are constants.


class Graph:
    """The nodes and constants of an ONNX model, to which each equation adds its own."""

    def __init__(self, given: Tensor, rules: Mapping[str, Callable[..., Any]]) -> None:
        self.input, self._rules = given, rules
        self.made_by: dict[str, onnx.NodeProto] = {}  # By the name of the result.
        self.tensors: dict[str, Tensor] = {}  # Likewise.
        self.reductions: dict[Tensor, Reduction] = {}  # By their results, with axes in order.
        self._constants: dict[str, np.ndarray] = {}
        self._small: dict[tuple, str] = {}

    def run(self, jaxpr: core.Jaxpr, consts: Sequence, inputs: Sequence[Value]) -> list[Value]:
        """Adds all equations of a jaxpr; returns its outputs."""
        values: dict[core.Var, Value] = {}

        def read(x: Any) -> Value:
            return values[x] if isinstance(x, core.Var) else np.asarray(x.val, x.aval.dtype)

        values.update(zip(jaxpr.constvars, map(np.asarray, consts), strict=True))
        values.update(zip(jaxpr.invars, inputs, strict=True))
        for equation in jaxpr.eqns:
            outputs = self._apply(equation, [*map(read, equation.invars)])
            values.update(zip(equation.outvars, outputs, strict=True))
        return [read(x) for x in jaxpr.outvars]

    def _apply(self, equation: core.JaxprEqn, inputs: list[Any]) -> Sequence[Value]:
        """Adds what an equation computes from some values, unless all of them are constant."""
        name, params = equation.primitive.name, equation.params
        outputs: list[Any] = [x.aval for x in equation.outvars]
        if name in _IDENTITIES:
            return inputs
        if name == "platform_index":  # The last one is the program of accelerators.
            return [np.array(len(params["platforms"]) - 1)]
        if name == "cond" and isinstance(inputs[0], np.ndarray):
            index, *inputs = inputs
            chosen = params["branches"][int(index)]
            return self.run(chosen.jaxpr, chosen.consts, inputs)
        if name in _CALLS:
            inner = params["call_jaxpr" if "call_jaxpr" in params else "jaxpr"]
            if isinstance(inner, core.ClosedJaxpr):
                return self.run(inner.jaxpr, inner.consts, inputs)
            return self.run(inner, (), inputs)
        if name == "scan":
            return self._unrolled(params, inputs)
        is_static = all(isinstance(n, int) for x in outputs for n in x.shape)
        if is_static and all(isinstance(x, np.ndarray) for x in inputs):
            return _computed(equation, outputs, inputs)
        if name not in self._rules:
            raise UntranslatedError(f"the translation knows no {name}")
        results = self._rules[name](self, params, outputs, *inputs)
        return results if isinstance(results, list) else [results]

    def _unrolled(self, params: Mapping[str, Any], inputs: list[Any]) -> Sequence[Value]:
        """Repeats a short loop over constants, such as a polynomial's coefficients."""
        ends = params["num_consts"], params["num_consts"] + params["num_carry"]
        consts, carry, rows = inputs[: ends[0]], inputs[ends[0] : ends[1]], inputs[ends[1] :]
        loop, length = params["jaxpr"], params["length"]
        is_constant = all(isinstance(x, np.ndarray) for x in rows)
        if not is_constant or length > _LONGEST or len(loop.out_avals) > len(carry):
            raise UntranslatedError("the translation knows no such loop")
        for i in range(length)[:: -1 if params["reverse"] else 1]:
            carry = self.run(
                loop.jaxpr, loop.consts, [*consts, *carry, *(np.asarray(x[i]) for x in rows)]
            )
        return carry

    def add(
        self, kind: str, inputs: Sequence[str], like: Any, order: Sequence[int] = (), **params: Any
    ) -> Tensor:
        """Adds a node whose result has the shape and dtype of `like`, by default in JAX's order."""
        name = self.node(f"v{len(self.made_by)}", kind, inputs, **params)
        shape = tuple(like.shape)
        order = tuple(order) or tuple(range(len(shape)))
        self.tensors[name] = Tensor(name, order, shape, np.dtype(like.dtype))
        return self.tensors[name]

    def node(self, result: str, kind: str, inputs: Sequence[str], **params: Any) -> str:
        """Adds a node, and names its result."""
        self.made_by[result] = helper.make_node(kind, inputs, [result], **params)
        return result

    def constant(self, value: Any, dtype: DTypeLike = np.int64) -> str:
        """Name of a constant, by default of integers."""
        array = np.asarray(value, dtype)
        key = (array.dtype, array.shape, array.tobytes() if array.size <= _SMALL else id(array))
        if key not in self._small:
            self._small[key] = f"c{len(self._constants)}"
            self._constants[self._small[key]] = array
        return self._small[key]

    def kind(self, name: str) -> str:
        """The kind of the node that computes a value; '' for inputs and constants."""
        return self.made_by[name].op_type if name in self.made_by else ""

    def number(self, name: str) -> float:
        """The value of a constant number; NaN for other names."""
        value = self._constants.get(name, np.empty(0))
        return float(value.ravel()[0]) if value.size == 1 else math.nan

    def ordered(self, x: Value, order: Sequence[int] | None = None) -> str:
        """Name of a value with its axes in an order, by default JAX's."""
        order = tuple(range(len(x.shape)) if order is None else order)
        if isinstance(x, np.ndarray):
            return self.constant(np.transpose(x, order), x.dtype)
        if order == x.order:
            return x.name
        if not x.moves(order):
            sizes = [x.shape[axis] for axis in order]
            return self.reshaped(x.name, sizes, jax.ShapeDtypeStruct(sizes, x.dtype)).name
        perm = [x.order.index(axis) for axis in order]
        return self.add("Transpose", [x.name], x, order, perm=perm).name

    def reshaped(self, name: str, shape: Sequence[Any], like: Any) -> Tensor:
        """Reshapes a tensor, of whose sizes one may be symbolic."""
        sizes = [n if isinstance(n, int) else -1 for n in shape]
        if sizes.count(-1) > 1:
            raise UntranslatedError("it splits the batch")
        return self.add("Reshape", [name, self.constant(sizes)], like)

    def shape(self, shape: Sequence[Any]) -> str:
        """Name of a shape, whose symbols are the size of the batch."""
        if any(n != self.input.shape[0] for n in shape if not isinstance(n, int)):
            raise UntranslatedError("it makes batches of another size")
        like = np.zeros(len(shape), np.int64)
        batch = self.add("Shape", [self.input.name], like[:1], start=0, end=1).name
        sizes = [self.constant([n]) if isinstance(n, int) else batch for n in shape]
        return self.add("Concat", sizes, like, axis=0).name

    def used(self, output: str) -> tuple[list[onnx.NodeProto], list[TensorProto]]:
        """The nodes and constants on which an output depends, in order."""
        needed = {output}
        for name, node in reversed(self.made_by.items()):
            needed.update(node.input if name in needed else ())
        nodes = [node for name, node in self.made_by.items() if name in needed]
        constants = {k: np.ascontiguousarray(x) for k, x in self._constants.items() if k in needed}
        # Runtimes leave NaN out of maxima, so that weights which are NaN would give numbers.
        if any(x.dtype.kind == "f" and np.isnan(x).any() for x in constants.values()):
            raise UntranslatedError("some of its weights are not a number")
        return nodes, [numpy_helper.from_array(x, name) for name, x in constants.items()]


def _computed(
    equation: core.JaxprEqn, outputs: Sequence[Any], inputs: Sequence[np.ndarray]
) -> Sequence[np.ndarray]:
    """Computes an equation's constants."""
    primitive, params, (out, *_) = equation.primitive, equation.params, outputs
    if primitive.name in _IN_NUMPY:
        return [np.asarray(_IN_NUMPY[primitive.name](*inputs), out.dtype)]
    if primitive.name in ("reshape", "squeeze"):
        return [inputs[0].reshape(out.shape)]
    if primitive.name == "broadcast_in_dim":
        sizes = dict(zip(params["broadcast_dimensions"], inputs[0].shape, strict=True))
        shape = [sizes.get(axis, 1) for axis in range(len(out.shape))]
        return [np.broadcast_to(inputs[0].reshape(shape), out.shape)]
    if primitive.name == "split":
        return np.split(inputs[0], np.cumsum(params["sizes"])[:-1], params["axis"])
    results = primitive.bind(*map(jnp.asarray, inputs), **params)
    return [*map(np.asarray, results if primitive.multiple_results else [results])]
