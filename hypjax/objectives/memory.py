"""Cross-batch memory: embeddings of earlier batches, to compare a batch with.

Source: Wang et al., "Cross-Batch Memory for Embedding Learning" (CVPR 2020).
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

_EMPTY = -1  # Label of a row that was never written.
_ROWS = {"unique_indices": True, "mode": "promise_in_bounds"}


class Memory(NamedTuple):
    """A ring buffer of points.

    Attributes:
        points: Points of the space.
        labels: Class of each; −1 for rows that were never written.
        place: Row of the next point; after the last row comes the first.
    """

    points: Float[Array, "size dim"]
    labels: Int[Array, " size"]
    place: Int[Array, ""]

    def rows(self, n: int) -> Int[Array, " n"]:
        """The rows of the next n points: those of the oldest.

        Raises:
            ValueError: There are more points than rows.
        """
        size = len(self.labels)
        if n > size:
            raise ValueError(f"a memory of {size} rows cannot hold {n} points")
        return (self.place + jnp.arange(n, dtype=jnp.int32)) % size

    def kept_labels(self, n: int) -> Int[Array, " size"]:
        """The labels of the rows that stay when n points are written; −1 for the others."""
        return self.labels.at[self.rows(n)].set(_EMPTY, **_ROWS)


class Write(NamedTuple):
    """Points that replace the oldest of a memory, see `hypjax.objectives.Change`.

    The memory is written when its step is done with it, so that it need not be copied.

    Attributes:
        memory: The memory.
        points: The points.
        labels: Class of each.
    """

    memory: Memory
    points: Float[Array, "n dim"]
    labels: Int[Array, " n"]

    def applied(self, valid: Bool[ArrayLike, ""]) -> Memory:
        """The memory with these points, or as it was if the step is not valid."""
        memory, rows = self.memory, self.memory.rows(len(self.labels))
        kept = (x.at[rows].get(**_ROWS) for x in (memory.points, memory.labels))
        points, labels = (
            jnp.where(valid, new, old)
            for new, old in zip((self.points, self.labels), kept, strict=True)
        )
        return Memory(
            memory.points.at[rows].set(points, **_ROWS),
            memory.labels.at[rows].set(labels.astype(memory.labels.dtype), **_ROWS),
            jnp.where(valid, (memory.place + len(rows)) % len(memory.labels), memory.place),
        )


def empty_memory(size: int, dim: int) -> Memory:
    """A memory without any point."""
    return Memory(
        jnp.zeros((size, dim)), jnp.full((size,), _EMPTY, jnp.int32), jnp.zeros((), jnp.int32)
    )


def number_of_rows(memory: float, training_images: int) -> int:
    """Number of rows that a configuration asks for.

    Args:
        memory: Their number, or, up to 1, their share of the training images.
        training_images: Number of training images.
    """
    return round(memory * training_images) if memory <= 1 else int(memory)
