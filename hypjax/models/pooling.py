"""How the tokens of an image become its embedding."""

import jax.numpy as jnp
from jaxtyping import Array, Float

_GEM_EXPONENT = 3.0  # Radenović et al., TPAMI 2019: the usual value.
_GEM_SMALLEST = 1e-6


def _gem(patches: Float[Array, "batch patches dim"]) -> Float[Array, "batch dim"]:
    """Generalised mean of what is positive."""
    powers = jnp.maximum(patches, _GEM_SMALLEST) ** _GEM_EXPONENT
    return jnp.mean(powers, axis=1) ** (1 / _GEM_EXPONENT)


_OF_PATCHES = {
    "avg": lambda patches: jnp.mean(patches, axis=1),
    "max": lambda patches: jnp.max(patches, axis=1),
    "avg_max": lambda patches: jnp.mean(patches, axis=1) + jnp.max(patches, axis=1),
    "gem": _gem,
}
_OF_PREFIX = {"cls": 1, "cls_dist_mean": 2}  # By how many tokens at the front.


def poolings(num_prefix_tokens: int) -> list[str]:
    """Names of the poolings for tokens, so many of which are not of patches.

    `cls` is the class token, `cls_dist_mean` the mean of it and the distillation token (DeiT); the
    others act on the patches alone: `avg`, `max`, their sum `avg_max`, and `gem`, the generalised
    mean with exponent 3 (IRT, El-Nouby et al., 2021, compares these).
    """
    return [name for name, n in _OF_PREFIX.items() if n <= num_prefix_tokens] + list(_OF_PATCHES)


def pool_tokens(
    tokens: Float[Array, "batch tokens dim"], num_prefix_tokens: int, pooling: str
) -> Float[Array, "batch dim"]:
    """One embedding an image.

    Args:
        tokens: The first ones not of patches.
        num_prefix_tokens: How many these are.
        pooling: One of `poolings`.
    """
    if pooling in _OF_PREFIX:
        return jnp.mean(tokens[:, : _OF_PREFIX[pooling]], axis=1)
    return _OF_PATCHES[pooling](tokens[:, num_prefix_tokens:])
