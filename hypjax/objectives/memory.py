"""Cross-batch memory: embeddings of earlier batches, with which a batch is compared.

Source: Wang et al., "Cross-Batch Memory for Embedding Learning" (CVPR 2020).
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

_EMPTY = -1  # Label of an empty row.
_ROWS = {"unique_indices": True, "mode": "promise_in_bounds"}


class Memory(NamedTuple):
    """A ring buffer of points."""

    points: Float[Array, "size dim"]
    labels: Int[Array, " size"]  # −1 for empty rows.
    place: Int[Array, ""]  # Row of the next point; after the last row comes the first.

    def next_rows(self, n: int) -> Int[Array, " n"]:
        """Rows of the oldest n ≤ size points, which the next n points replace."""
        return (self.place + jnp.arange(n, dtype=jnp.int32)) % len(self.labels)

    def write(self, points: Float[Array, "n dim"], labels: Int[Array, " n"]) -> "Memory":
        """Returns the memory with the oldest points replaced by these.

        A point that is not finite empties its row, so that it does not spoil later losses. Points
        of a step whose update is dropped stay: restoring the old ones would copy the whole memory.
        """
        rows = self.next_rows(len(labels))
        finite = jnp.all(jnp.isfinite(points), axis=1)
        points = self.points.at[rows].set(jnp.where(finite[:, None], points, 0), **_ROWS)
        labels = jnp.where(finite, labels.astype(self.labels.dtype), _EMPTY)
        labels = self.labels.at[rows].set(labels, **_ROWS)
        return Memory(points, labels, (self.place + len(rows)) % len(self.labels))


def empty_memory(size: int, dim: int) -> Memory:
    """Creates a memory whose rows are all empty."""
    return Memory(
        jnp.zeros((size, dim)), jnp.full((size,), _EMPTY, jnp.int32), jnp.zeros((), jnp.int32)
    )
