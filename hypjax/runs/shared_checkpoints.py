"""Checkpoints of a run with several processes, of which only the first uses the disk."""

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
    """The interface of `Checkpoints` for several processes.

    All processes must call the methods together, and all get the same results. The first process
    writes gathered arrays to its folder, and broadcasts the arrays that it reads.
    """

    def __init__(self, open_checkpoints: Callable[[], Checkpoints]) -> None:
        """Opens the checkpoints in the first process.

        Args:
            open_checkpoints: Opens the folder; called in the first process only.

        Raises:
            UserError: The folder cannot be opened.
        """
        self._local = open_checkpoints() if processes.is_first() else None

    @property
    def steps(self) -> list[int]:
        """See `Checkpoints.steps`."""
        return processes.from_first(lambda: self._local.steps)

    @property
    def best_step(self) -> int | None:
        """See `Checkpoints.best_step`."""
        return processes.from_first(lambda: self._local.best_step)

    @property
    def best_score(self) -> float | None:
        """See `Checkpoints.best_score`."""
        return processes.from_first(lambda: self._local.best_score)

    def save(
        self, step: int, *, record: Mapping[str, Any], score: float | None = None, **trees: PyTree
    ) -> None:
        """See `Checkpoints.save`."""
        trees = parallel.gather(trees)
        if self._local is not None:
            if jax.process_count() > 1:  # Of jax.Arrays Orbax expects every process to save a part.
                trees = jax.tree.map(np.asarray, trees)
            self._local.save(step, record=record, score=score, **trees)

    def wait(self) -> None:
        """See `Checkpoints.wait`; only the first process waits."""
        if self._local is not None:
            self._local.wait()

    def restore_latest(self, **like: PyTree) -> Restored | None:
        """See `Checkpoints.restore_latest`; arrays get the shardings of those in `like`."""
        return self._broadcast(lambda: self._local.restore_latest(**like), like)

    def restore_best(self, **like: PyTree) -> Restored | None:
        """See `Checkpoints.restore_best`; arrays get the shardings of those in `like`."""
        return self._broadcast(lambda: self._local.restore_best(**like), like)

    def _broadcast(self, read: Callable[[], Restored | None], like: dict[str, PyTree]) -> Any:
        """Reads a checkpoint in the first process and broadcasts it to all."""
        restored = read() if self._local is not None else None
        facts = processes.from_first(
            lambda: restored and {"step": restored.step, "record": restored.record}
        )
        if facts is None:
            return None
        like = tuple(like.values())
        trees = processes.arrays_from_first(lambda: restored.trees, like)
        trees = jax.tree.map(_place_like, trees, like)
        return Restored(facts["step"], trees, facts["record"])

    def close(self) -> None:
        """See `Checkpoints.close`."""
        if self._local is not None:
            self._local.close()


def _place_like(x: Any, like: Any) -> Any:
    sharding = getattr(like, "sharding", None)
    return parallel.place(x, sharding) if isinstance(sharding, NamedSharding) else x
