"""JAX functions of weights and images as ONNX models.

The function is traced. What depends on weights alone is computed here and now, and enters the file
as a constant; each of the other operations becomes nodes by its rule in
`hypjax.integrations.onnx_primitives`. jax2onnx 0.17.1, which does the same for many more models,
lacks operations of these ones and does not leave the number of images open for them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
from jax.extend import core
from jaxtyping import Array, PyTree
from onnx import helper

from hypjax.integrations.onnx_graph import BATCH, Graph, Tensor, counts_images, integers, known
from hypjax.integrations.onnx_primitives import ELEMENTWISE, RULES, broadcast, unsupported
from hypjax.types import View

Values = dict[core.Var, Tensor]
_CALLS = {
    *("jit", "pjit", "call", "core_call", "closed_call", "core_closed_call"),
    *("remat", "remat2", "checkpoint"),  # Names of several versions of JAX.
    *("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"),
}
_PIXELS, _FEATURES = "images", "features"  # Names of the input.


def onnx_model(
    function: Callable[[PyTree, Array], Array],
    params: PyTree,
    example: jax.ShapeDtypeStruct,
    view: View | None,
    metadata: Mapping[str, str],
) -> onnx.ModelProto:
    """Returns a model of any number of images.

    Args:
        function: Function of parameters and a batch, to be converted; it returns [batch, dim],
            float32.
        params: The parameters; their paths name the constants of the model.
        example: Shape and dtype of one image as the function takes it, without the batch.
        view: How images of other sizes are resized and cropped to it, by nodes of the model; None
            for a function of features.
        metadata: What the model says about itself.

    Raises:
        UserError: An operation of the function has no rule, or makes images depend on each other.
        ValueError: The weights do not fit into one file.
    """
    graph = Graph()
    shape, name = example.shape, _FEATURES if view is None else _PIXELS
    open_shape = ["batch", *(shape if view is None else ("height", "width", view.channels))]
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(example.dtype))
    batch = Tensor(name, (BATCH, *shape))
    graph.scope = "view"
    given = graph.add("Shape", [batch], (len(open_shape),))
    graph.batch = graph.add("Slice", [given, integers(0), integers(1)], (1,))
    if view is not None:
        batch = _viewed(graph, batch, given, view)
    graph.scope = ""
    output = _trace(graph, function, params, batch, example.dtype)
    inputs = [helper.make_tensor_value_info(name, kind, open_shape)]
    return graph.model(inputs, output, metadata)


def _trace(
    graph: Graph, function: Callable[..., Array], params: PyTree, batch: Tensor, dtype: Any
) -> Tensor:
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), params)
    images = jax.ShapeDtypeStruct(batch.shape, dtype)
    traced = jax.make_jaxpr(function)(shapes, images)
    paths, _ = jax.tree.flatten_with_path(params)
    weights = [
        known(leaf, jax.tree_util.keystr(path, simple=True, separator="/")) for path, leaf in paths
    ]
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        (output,) = _walk(graph, traced.jaxpr, traced.consts, [*weights, batch])
        return graph.expanded(output, traced.out_avals[0].shape)


def _viewed(graph: Graph, images: Tensor, given: Tensor, view: View) -> Tensor:
    """What `hypjax.data.views` shows of images: resized by Pillow's filter, and cropped."""
    side, channels, unknown = view.side, view.channels, (-1, -1)
    size = given_size = graph.add("Slice", [given, integers(1), integers(3)], (2,))
    if view.test == "squash":
        size = integers(side, side)
    else:
        shorter = graph.add("ReduceMin", [size], (1,), keepdims=1)
        size = graph.add("Mul", [size, integers(view.resize)], (2,))
        size = graph.add("Div", [size, shorter], (2,))
    planes = graph.add("Transpose", [images], (BATCH, channels, *unknown), perm=[0, 3, 1, 2])
    # Each channel becomes an image. Otherwise ONNX Runtime 1.32 would move the transposition behind
    # the resizing, which it then refuses.
    single = (BATCH * channels, 1)
    wanted = graph.add("Concat", [integers(-1, 1), given_size], (4,), axis=0)
    planes = graph.add("Reshape", [planes, wanted], (*single, *unknown))
    planes = graph.add(
        "Resize",
        [planes, None, None, size],
        (*single, *unknown),
        axes=[2, 3],
        mode="cubic",
        cubic_coeff_a=-0.5,
        antialias=1,
        exclude_outside=1,
    )
    if view.test != "squash":
        room = graph.add("Sub", [size, integers(side)], (2,))
        room = graph.add("Cast", [room], (2,), to=onnx.TensorProto.FLOAT)
        half = graph.add("Mul", [room, known(np.float32(0.5))], (2,))
        half = graph.add("Round", [half], (2,))  # Halves to even numbers, like Python's.
        first = graph.add("Cast", [half], (2,), to=onnx.TensorProto.INT64)
        last = graph.add("Add", [first, integers(side)], (2,))
        planes = graph.add("Slice", [planes, first, last, integers(2, 3)], (*single, side, side))
    planes = graph.add("Reshape", [planes, integers(-1, channels, side, side)], (BATCH,))
    return graph.add("Transpose", [planes], images.shape, perm=[0, 2, 3, 1])


def _walk(
    graph: Graph, jaxpr: core.Jaxpr, constants: Sequence[Any], arguments: Sequence[Tensor]
) -> list[Tensor]:
    """Adds the operations of a program to the graph, and returns its results."""
    values: Values = dict(zip(jaxpr.constvars, map(known, constants), strict=True))
    values.update(zip(jaxpr.invars, arguments, strict=True))
    outer = graph.scope
    for equation in jaxpr.eqns:
        own = str(equation.source_info.name_stack)
        graph.scope = "/".join(filter(None, (outer, own)))  # Its own is relative to the call.
        inputs = [_read(values, atom) for atom in equation.invars]
        outputs = _converted(graph, equation, inputs)
        values.update(zip(equation.outvars, outputs, strict=True))
    graph.scope = outer
    return [_read(values, atom) for atom in jaxpr.outvars]


def _read(values: Values, atom: core.Var | core.Literal) -> Tensor:
    if isinstance(atom, core.Literal):
        return known(np.asarray(atom.val, atom.aval.dtype))
    return values[atom]


def _converted(graph: Graph, equation: core.JaxprEqn, inputs: list[Tensor]) -> list[Tensor]:
    """The outputs of one equation."""
    name, params = equation.primitive.name, equation.params
    if name == "platform_index":  # Of several programs, the one for platforms not named.
        return [known(np.int32(params["platforms"].index(None)))]
    if name == "cond":
        which, *rest = inputs
        if which.value is None:
            raise unsupported(graph, equation, " by a number that depends on the image")
        branch = params["branches"][int(which.value)]
        return _walk(graph, branch.jaxpr, branch.consts, rest)
    if name == "scan":
        return _unrolled(graph, equation, inputs)
    if name == "broadcast_in_dim":
        return [broadcast(graph, equation, inputs[0])]
    if name in _CALLS:
        called = params.get("jaxpr", params.get("call_jaxpr"))
        closed = isinstance(called, core.ClosedJaxpr)
        program, constants = (called.jaxpr, called.consts) if closed else (called, [])
        return _walk(graph, program, constants, inputs)
    if _is_known(equation, inputs):
        return _computed(equation, inputs)
    _check(graph, equation)
    if name in ELEMENTWISE:
        found = ELEMENTWISE[name](graph, equation, *inputs)
    elif name in RULES:
        pairs = zip(inputs, equation.invars, strict=True)
        whole = [graph.expanded(each, atom.aval.shape) for each, atom in pairs]
        found = RULES[name](graph, equation, *whole)
    else:
        raise unsupported(graph, equation)
    return [found] if isinstance(found, Tensor) else found


def _check(graph: Graph, equation: core.JaxprEqn) -> None:
    """Refuses what loses the axis of images, has two of them, or is in a type that ONNX lacks."""
    before, after = (
        max((sum(map(counts_images, atom.aval.shape)) for atom in atoms), default=0)
        for atoms in (equation.invars, equation.outvars)
    )
    if after > 1 or before > after:
        raise graph.mixing(f"{equation.primitive.name} across images")
    if any(atom.aval.dtype == jnp.bfloat16 for atom in (*equation.invars, *equation.outvars)):
        raise unsupported(graph, equation, " in bfloat16")


def _is_known(equation: core.JaxprEqn, inputs: Sequence[Tensor]) -> bool:
    """Whether an equation depends on weights alone, and has no axis of images."""
    if any(each.value is None for each in inputs):
        return False
    atoms = (*equation.invars, *equation.outvars)
    return not any(counts_images(n) for atom in atoms for n in atom.aval.shape)


def _computed(equation: core.JaxprEqn, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Computes an equation; results are named by the largest of the weights."""
    pairs = zip(inputs, equation.invars, strict=True)
    arrays = [np.broadcast_to(each.value, atom.aval.shape) for each, atom in pairs]
    found = equation.primitive.bind(*map(jax.numpy.asarray, arrays), **equation.params)
    found = found if equation.primitive.multiple_results else [found]
    named = max(inputs, key=lambda each: each.value.size, default=known(0))
    return [known(each, named.name) for each in found]


def _unrolled(graph: Graph, equation: core.JaxprEqn, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The steps of a loop over known values, such as coefficients, one after the other."""
    own = equation.params
    constants, carry = own["num_consts"], own["num_carry"]
    fixed, state = list(inputs[:constants]), list(inputs[constants : constants + carry])
    steps = inputs[constants + carry :]
    if len(equation.outvars) != carry or any(each.value is None for each in steps):
        raise unsupported(graph, equation, " over values that depend on the image")
    order = range(own["length"])
    body = own["jaxpr"]
    for i in reversed(order) if own["reverse"] else order:
        # An axis of length 1 may stand for all steps.
        rows = [known(each.value[i % len(each.value)], each.name) for each in steps]
        state = _walk(graph, body.jaxpr, body.consts, [*fixed, *state, *rows])
    return state
