"""Checkpoints of a run (Orbax): the latest two and the best one, verified by checksums."""

import contextlib
import hashlib
import logging
import pathlib
import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging as absl_logging
from jax.sharding import NamedSharding
from jaxtyping import PyTree
from orbax.checkpoint import checkpoint_managers

from hypjax import parallel
from hypjax.errors import UserError, explained, reason, writing
from hypjax.parallel import processes
from hypjax.system import console
from hypjax.system.files import sync, sync_all

_ADVICE = "; restore a backup, or start over in another folder with --workdir"
_RECORD = "record"  # The Orbax item with the JSON values that accompany the trees of arrays.


class DamagedError(Exception):
    """A saved state cannot be read, or differs from what was saved."""


def checksum(tree: PyTree) -> int:
    """CRC-32 of a tree's arrays: Orbax reads a file with a flipped bit without complaint."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        total = zlib.crc32(np.ravel(np.asarray(leaf)).view(np.uint8), total)
    return total


class Restored(NamedTuple):
    """A checkpoint that was read: its trees in the order of the request, and its JSON values."""

    step: int
    trees: tuple[PyTree, ...]
    record: dict[str, Any]


class Checkpoints:
    """The latest two checkpoints of a run and the best one; each holds named trees of arrays.

    Saves run in the background; after `wait`, they survive a power failure. A failed save is
    reported and leaves earlier checkpoints intact. All processes call the methods together: the
    first writes gathered arrays, and broadcasts what it reads. If read-only, each reads for itself.
    """

    def __init__(self, path: pathlib.Path, *, read_only: bool = False) -> None:
        self._path = path.absolute()  # Orbax takes no other.
        self._read_only = read_only
        self._saving: int | None = None
        self._manager: ocp.CheckpointManager | None = None
        if read_only or processes.is_first():
            # Orbax and asyncio log the failures that are reported here, with their tracebacks.
            for logger in (absl_logging.get_absl_logger(), logging.getLogger("asyncio")):
                logger.addFilter(_is_not_of_orbax)
            with writing(path):
                self._open()

    def _open(self) -> None:
        if not self._read_only:
            self._path.mkdir(parents=True, exist_ok=True)
        this_process = ocp.options.MultiprocessingOptions()
        if jax.process_count() > 1:  # Or it waits for the others.
            i = jax.process_index()
            this_process = ocp.options.MultiprocessingOptions(i, {i}, f"process_{i}")
        options = ocp.CheckpointManagerOptions(
            # Orbax would wait minutes for a folder that cannot be created asynchronously.
            async_options=ocp.AsyncOptions(
                create_directories_asynchronously=False, post_finalization_callback=self._sync
            ),
            create=False,
            multiprocessing_options=this_process,
            cleanup_tmp_directories=not self._read_only,  # Left by killed processes.
            preservation_policy=self,
        )
        problem = f"the checkpoints in {self._path} cannot be listed"
        with explained(problem, _ADVICE):  # Such as metadata that are JSON, but no dictionary.
            self._manager = ocp.CheckpointManager(self._path, options=options)
        self._scores: dict[int, float] = {}
        for step in self._steps():
            with contextlib.suppress(Exception):  # Damage is reported when the step is restored.
                if (score := self._read(step, {})[_RECORD]["score"]) is not None:
                    self._scores[step] = score

    @property
    def steps(self) -> list[int]:
        """Steps of all checkpoints, ascending, including one that is being saved."""
        return processes.from_first(self._steps)

    @property
    def best(self) -> tuple[int, float] | tuple[None, None]:
        """Step and score of the best checkpoint; of equal scores, which are common, the latest."""
        return tuple(processes.from_first(lambda: [*self._ranked(), (None, None)][0]))

    def _steps(self) -> list[int]:
        return sorted(self._manager.all_steps())

    def _ranked(self) -> list[tuple[int, float]]:
        return sorted(self._scores.items(), key=lambda item: (-item[1], -item[0]))

    def should_preserve(
        self, checkpoints: Sequence[Any], *, context: checkpoint_managers.PreservationContext
    ) -> list[bool]:
        """Orbax's policy: keep the latest two and the best."""
        # Orbax's own `BestN` cannot even open a folder whose file of scores is damaged.
        steps = {info.step for info in checkpoints[-2:]} | {*dict(self._ranked()[:1])}
        return [info.step in steps for info in checkpoints]

    def save(
        self, step: int, *, record: Mapping[str, Any], score: float | None = None, **trees: PyTree
    ) -> None:
        """Starts to save a checkpoint with JSON values; once complete, it supersedes older ones."""
        trees = parallel.gather(trees)
        if self._manager is None:
            return
        if jax.process_count() > 1:  # Of jax.Arrays Orbax expects every process to save a part.
            trees = jax.tree.map(np.asarray, trees)
        self.wait()
        facts = {
            "score": score,
            "checksums": {name: checksum(tree) for name, tree in trees.items()},
            "shapes": {name: _shapes(tree) for name, tree in trees.items()},
            "record": record,
        }
        items = {name: ocp.args.StandardSave(tree) for name, tree in trees.items()}
        items[_RECORD] = ocp.args.JsonSave(facts)
        self._saving = step
        if score is not None:
            self._scores[step] = score
        composite = ocp.args.Composite(**items)
        self._attempt(lambda: self._manager.save(step, args=composite, force=True))

    def wait(self) -> None:
        """Waits for the checkpoint being saved; warns if that fails."""
        if self._saving is not None and self._attempt(self._finish):
            self._saving = None

    def _finish(self) -> None:
        self._manager.wait_until_finished()
        for folder in (self._path, self._path.parent, self._path.parent.parent):
            sync(folder)  # Their new names.

    def _sync(self) -> None:
        """Syncs a checkpoint before it gets its name, and the run's metrics and other files."""
        for unfinished in self._path.glob("*.orbax-checkpoint-tmp*"):
            sync_all(unfinished)
        for path in filter(pathlib.Path.is_file, self._path.parent.iterdir()):
            with contextlib.suppress(FileNotFoundError):
                sync(path)

    def _attempt(self, action: Callable[[], object]) -> bool:
        """Runs a part of a save; returns whether it succeeds."""
        try:
            action()
            return True
        except Exception as error:  # For a full disk, TensorStore raises a ValueError.
            problem = f"the state after step {self._saving} could not be saved in {self._path}"
            remedy = "the run continues to the next checkpoint"
            console.warn(f"{problem} ({reason(error)}); {remedy}")
        self._scores.pop(self._saving, None)
        self._saving = None
        with contextlib.suppress(Exception):  # Other saves of this manager would fail, too.
            self._open()
        return False

    def restore_latest(self, **like: PyTree) -> Restored | None:
        """Reads the latest checkpoint that is not damaged; None if there is none at all.

        `like` holds trees of arrays or `jax.ShapeDtypeStruct`s, with shapes and shardings. Damaged
        checkpoints are reported and, unless read-only, moved out of the folder. If all are damaged,
        they stay, and that is an error.
        """
        return self._broadcast(lambda: self._first_intact(self._steps()[::-1], like), like)

    def restore_best(self, **like: PyTree) -> Restored | None:
        """Reads trees of the best checkpoint that is not damaged; None if there is none."""
        return self._broadcast(lambda: self._first_intact([*dict(self._ranked())], like), like)

    def _first_intact(self, steps: Sequence[int], like: dict[str, PyTree]) -> Restored | None:
        """Reads the first checkpoint that is not damaged; moves those before it aside."""
        restored, damaged = None, {}
        for step in steps:
            try:
                restored = self.restore(step, **like)
                break
            except DamagedError as error:
                damaged[step] = str(error)
        if damaged and damaged.keys() == {*self._steps()}:
            facts = f"steps {', '.join(map(str, damaged))}: {damaged[max(damaged)]}"
            raise UserError(f"every checkpoint in {self._path} is damaged ({facts}){_ADVICE}")
        for step, why in damaged.items():
            console.warn(f"the checkpoint of step {step} in {self._path} is damaged ({why})")
            self._scores.pop(step, None)
            if not self._read_only:
                target = self._path.parent / f"damaged-step-{step}"
                with writing(target):
                    shutil.rmtree(target, ignore_errors=True)
                    (self._path / str(step)).rename(target)
                self._manager.reload()
        return restored

    def _broadcast(
        self, read: Callable[[], Restored | None], like: dict[str, PyTree]
    ) -> Restored | None:
        """Reads a checkpoint in the first process, or this one, and broadcasts it to all."""
        if self._read_only:
            return read()
        local: list[Restored | None] = []
        facts = processes.from_first(
            lambda: local.append(read()) or (local[0] and [local[0].step, local[0].record])
        )
        if facts is None:
            return None
        like = tuple(like.values())
        trees = processes.arrays_from_first(lambda: local[0].trees, like)
        return Restored(facts[0], jax.tree.map(_place_like, trees, like), facts[1])

    def restore(self, step: int, **like: PyTree) -> Restored:
        """Reads trees of one checkpoint in this process; raises `DamagedError` if they changed.

        Arrays are read to the host, since they may have been saved on other devices, and returned
        uncommitted, like new ones: committed arrays would compile a second train step.
        """
        try:
            facts = self._read(step, {})[_RECORD]
            if same := all(facts["shapes"][name] == _shapes(like[name]) for name in like):
                read = self._read(step, like)
        except Exception as error:  # Exceptions depend on the kind of damage.
            raise DamagedError(reason(error)) from error
        if not same:  # Orbax would cut or fill the arrays.
            problem = f"the checkpoints in {self._path} are of another encoder or objective"
            raise UserError(f"{problem}; pass theirs")
        for name in like:
            if checksum(read[name]) != facts["checksums"][name]:
                raise DamagedError(f"its {name} differs from what was saved")
        trees = jax.device_put([read[name] for name in like])
        return Restored(step, tuple(trees), facts["record"])

    def _read(self, step: int, like: Mapping[str, PyTree]) -> Any:
        host = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), like)
        items = {name: ocp.args.StandardRestore(tree) for name, tree in host.items()}
        items[_RECORD] = ocp.args.JsonRestore()
        return self._manager.restore(step, args=ocp.args.Composite(**items))

    def close(self) -> None:
        """Waits for the checkpoint being saved and closes the folder."""
        self.wait()
        if self._manager is not None:
            self._manager.close()


def _is_not_of_orbax(log: logging.LogRecord) -> bool:
    where = f"{log.pathname} {log.getMessage()}"
    return "/orbax/checkpoint/" not in where and ".orbax-checkpoint-tmp" not in where


def _shapes(tree: PyTree) -> str:
    leaves = [(jax.tree_util.keystr(p), leaf.shape) for p, leaf in jax.tree.leaves_with_path(tree)]
    return hashlib.sha256(repr(sorted(leaves)).encode()).hexdigest()[:16]


def _place_like(x: Any, like: Any) -> Any:
    sharding = getattr(like, "sharding", None)
    return parallel.place(x, sharding) if isinstance(sharding, NamedSharding) else x
