"""Parameters in parts: each device holds one, and gathers the others where it needs them."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

# Maps parameters, tokens and a further argument to tokens.
ApplyBlock: TypeAlias = Callable[[PyTree, Array, PyTree], Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Part:
    """This device's part of a parameter, inside of `jax.shard_map`."""

    array: Array
    axis: int = dataclasses.field(metadata={"static": True})  # The parameter's axis that is cut.
    devices: str = dataclasses.field(metadata={"static": True})  # Mesh axis of the other parts.


def gather(params: PyTree, *, leaving: Collection[str] = ()) -> PyTree:
    """Gathers parameters in parts, except below the names `leaving`.

    The gradient of a parameter is summed over the devices, and scattered: each device receives that
    of its part.
    """
    if isinstance(params, Part):
        return jax.lax.all_gather(params.array, params.devices, axis=params.axis, tiled=True)
    if not isinstance(params, Mapping):
        return params
    return {
        name: values if name in leaving else gather(values, leaving=leaving)
        for name, values in params.items()
    }


def has_parts(params: PyTree) -> bool:
    """Whether parameters are in parts."""
    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, Part))
    return any(isinstance(leaf, Part) for leaf in leaves)


def apply_blocks(
    apply: ApplyBlock,
    apply_last: ApplyBlock,
    blocks: Sequence[PyTree],
    tokens: Array,
    inputs: Sequence[PyTree],
    *,
    remat: bool,
) -> Array:
    """Applies blocks, whose parameters are in parts, one after the other to the images' tokens.

    A block's parameters are gathered before it, and again for its gradient, so that memory holds
    those of one block. Its gradient also recomputes what is cheap, or, with `remat`, everything.
    `inputs` are a further argument of each block.
    """

    def gathering(apply: ApplyBlock) -> ApplyBlock:
        policy = None if remat else _is_costly
        return jax.checkpoint(lambda params, *args: apply(gather(params), *args), policy=policy)

    def step(tokens: Array, block: tuple[PyTree, PyTree]) -> tuple[Array, None]:
        params, inputs = block
        return gathering(apply)(params, tokens, inputs), None

    *lower, (last, last_inputs) = zip(blocks, inputs, strict=True)
    if lower:
        # A loop: of unrolled blocks, XLA would gather several at once, or keep them for the
        # gradient.
        stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), *lower)
        tokens, _ = jax.lax.scan(step, tokens, stacked)
    return gathering(apply_last)(last, tokens, last_inputs)


def _is_costly(primitive: Any, *_: Any, **params: Any) -> bool:
    """Whether the gradient keeps a primitive's result: that of a product, or of fused attention."""
    # The products of `Dense` have a gradient of their own.
    is_product = primitive.name in ("dot_general", "custom_vjp_call")
    return is_product or "attention" in primitive.name
