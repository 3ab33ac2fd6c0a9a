"""A run's checkpoints as all its processes see them, of which the first alone reads and writes."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import PyTree

from hypjax import parallel
from hypjax.parallel import processes
from hypjax.runs.checkpoints import Checkpoints, Restored


class SharedCheckpoints:
    """`Checkpoints` whose methods all processes call at once, and all get the same answers.

    The first process's folder is the only one; arrays are put together there, and handed out.
    """

    def __init__(self, open_own: Callable[[], Checkpoints]) -> None:
        """Opens them, in the first process.

        Args:
            open_own: Does so.

        Raises:
            UserError: They cannot be opened.
        """
        self._own = open_own() if processes.is_first() else None

    @property
    def steps(self) -> list[int]:
        """See `Checkpoints.steps`."""
        return processes.from_first(lambda: self._own.steps)

    @property
    def best_step(self) -> int | None:
        """See `Checkpoints.best_step`."""
        return processes.from_first(lambda: self._own.best_step)

    @property
    def best_score(self) -> float | None:
        """See `Checkpoints.best_score`."""
        return processes.from_first(lambda: self._own.best_score)

    def save(
        self, step: int, *, record: Mapping[str, Any], score: float | None = None, **trees: PyTree
    ) -> None:
        """See `Checkpoints.save`."""
        trees = parallel.gather(trees)
        if self._own is not None:
            if jax.process_count() > 1:  # Orbax takes arrays of a global run to be in others' care.
                trees = jax.tree.map(np.asarray, trees)
            self._own.save(step, record=record, score=score, **trees)

    def wait(self) -> None:
        """See `Checkpoints.wait`; the other processes do not."""
        if self._own is not None:
            self._own.wait()

    def restore_latest(self, **like: PyTree) -> Restored | None:
        """See `Checkpoints.restore_latest`; arrays come to lie where those of the same name do."""
        return self._shared(lambda: self._own.restore_latest(**like), like)

    def restore_best(self, **like: PyTree) -> Restored | None:
        """See `Checkpoints.restore_best`; arrays come to lie where those of the same name do."""
        return self._shared(lambda: self._own.restore_best(**like), like)

    def _shared(self, read: Callable[[], Restored | None], like: dict[str, PyTree]) -> Any:
        restored = read() if self._own is not None else None
        rest = processes.from_first(
            lambda: restored and {"step": restored.step, "record": restored.record}
        )
        if rest is None:
            return None
        like = tuple(like.values())
        trees = processes.arrays_from_first(lambda: restored.trees, like)
        trees = jax.tree.map(_placed_like, trees, like)
        return Restored(rest["step"], trees, rest["record"])

    def close(self) -> None:
        """See `Checkpoints.close`."""
        if self._own is not None:
            self._own.close()


def _placed_like(x: Any, like: Any) -> Any:
    sharding = getattr(like, "sharding", None)
    return parallel.place(x, sharding) if isinstance(sharding, NamedSharding) else x
