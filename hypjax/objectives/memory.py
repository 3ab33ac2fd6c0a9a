"""A memory of earlier batches, with which losses of pairs compare images."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

_EMPTY = -1  # Label of an empty row.


class Memory(NamedTuple):
    """Cross-batch memory: a ring buffer of points of earlier batches (Wang et al., CVPR 2020)."""

    points: Float[Array, "size dim"]
    labels: Int[Array, " size"]  # −1 for empty rows.
    place: Int[Array, ""]  # Row of the next point; after the last row comes the first.

    def next_rows(self, n: int) -> Int[Array, " n"]:
        """Rows of the oldest n ≤ size points, which the next n points replace."""
        return (self.place + jnp.arange(n, dtype=jnp.int32)) % len(self.labels)

    def write(self, points: Float[Array, "n dim"], labels: Int[Array, " n"]) -> "Memory":
        """Returns the memory with the oldest points replaced by these.

        A point that is not finite empties its row, so that it does not spoil later losses. Points
        stay even if a step's update is dropped: restoring the old ones would copy the whole memory.
        """
        rows = self.next_rows(len(labels))
        finite = jnp.all(jnp.isfinite(points), axis=1)
        # Rows differ and are in bounds, see `next_rows`.
        points = self.points.at[rows].set(
            jnp.where(finite[:, None], points, 0), unique_indices=True, mode="promise_in_bounds"
        )
        labels = jnp.where(finite, labels.astype(self.labels.dtype), _EMPTY)
        labels = self.labels.at[rows].set(labels, unique_indices=True, mode="promise_in_bounds")
        return Memory(points, labels, (self.place + len(rows)) % len(self.labels))


def empty_memory(size: int, dim: int) -> Memory:
    """Creates a memory whose rows are all empty."""
    points = jnp.zeros((size, dim))
    labels = jnp.full((size,), _EMPTY, jnp.int32)
    return Memory(points, labels, place=jnp.zeros((), jnp.int32))
