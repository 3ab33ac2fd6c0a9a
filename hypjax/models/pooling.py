"""Pooling: the tokens of an image become its embedding."""

import jax.numpy as jnp
from jaxtyping import Array, Float

_GEM_EXPONENT = 3.0  # The usual value (Radenović et al., TPAMI 2019).
_GEM_MIN = 1e-6


def _gem(patches: Float[Array, "batch patches dim"]) -> Float[Array, "batch dim"]:
    """Generalised mean of the values, raised to a small positive minimum (GeM)."""
    powers = jnp.maximum(patches, _GEM_MIN) ** _GEM_EXPONENT
    return jnp.mean(powers, axis=1) ** (1 / _GEM_EXPONENT)


_PATCH_POOLINGS = {
    "avg": lambda patches: jnp.mean(patches, axis=1),
    "max": lambda patches: jnp.max(patches, axis=1),
    "avg_max": lambda patches: jnp.mean(patches, axis=1) + jnp.max(patches, axis=1),
    "gem": _gem,
}
_PREFIX_POOLINGS = {"cls": 1, "cls_dist_mean": 2}  # Number of leading tokens averaged.


def poolings(num_prefix_tokens: int) -> list[str]:
    """Names of the poolings that an encoder supports.

    `cls` is the class token, and `cls_dist_mean` the mean of the class and distillation tokens
    (DeiT). The others act on the patch tokens alone: `avg`, `max`, their sum `avg_max`, and `gem`,
    the generalised mean with exponent 3 (El-Nouby et al., IRT, 2021, compare these).

    Args:
        num_prefix_tokens: Number of tokens that precede the patch tokens.
    """
    return [name for name, n in _PREFIX_POOLINGS.items() if n <= num_prefix_tokens] + list(
        _PATCH_POOLINGS
    )


def pool_tokens(
    tokens: Float[Array, "batch tokens dim"], num_prefix_tokens: int, pooling: str
) -> Float[Array, "batch dim"]:
    """Pools the tokens of each image into one embedding.

    Args:
        tokens: Prefix tokens, then patch tokens, [batch, tokens, dim].
        num_prefix_tokens: Number of prefix tokens.
        pooling: One of `poolings`.

    Returns:
        Embeddings, [batch, dim], in the dtype of the tokens.
    """
    if pooling in _PREFIX_POOLINGS:
        return jnp.mean(tokens[:, : _PREFIX_POOLINGS[pooling]], axis=1)
    return _PATCH_POOLINGS[pooling](tokens[:, num_prefix_tokens:])
