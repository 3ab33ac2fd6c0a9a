"""Checksums of saved states, which detect damaged files."""

import json
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, PyTree, UInt32


class DamagedError(Exception):
    """A saved state cannot be read, or differs from what was saved."""


@jax.jit
def checksum(tree: PyTree) -> UInt32[Array, ""]:
    """Returns a checksum of a tree's arrays that any flipped bit changes; computed on the device.

    The words of an array are mixed one by one, as in hash functions, and summed modulo 2³² with odd
    weights that depend on their position.
    """
    total = jnp.uint32(0)
    for index, leaf in enumerate(jax.tree.leaves(tree)):
        leaf = leaf.astype(jnp.uint8) if leaf.dtype == bool else leaf
        word = jnp.dtype(f"uint{8 * min(leaf.dtype.itemsize, 4)}")
        words = lax.bitcast_convert_type(leaf, word).astype(jnp.uint32).reshape(-1)
        words = (words ^ (words >> 16)) * jnp.uint32(0x85EBCA6B)
        words = words ^ (words >> 13)
        weights = 2 * lax.iota(jnp.uint32, words.size) + 1
        total += jnp.uint32(2 * index + 1) * jnp.sum(words * weights, dtype=jnp.uint32)
    return total


def with_checksum(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns JSON values with a checksum of them under "checksum"."""
    return {**facts, "checksum": _json_checksum(facts)}


def require_intact(facts: dict[str, Any]) -> dict[str, Any]:
    """Returns values that `with_checksum` returned.

    Raises:
        DamagedError: They were changed since.
    """
    if _json_checksum(facts) != facts["checksum"]:
        raise DamagedError("its record differs from what was saved")
    return facts


def _json_checksum(facts: Mapping[str, Any]) -> int:
    content = {name: value for name, value in facts.items() if name != "checksum"}
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
