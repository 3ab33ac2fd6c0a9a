"""Checkpoints of a run (Orbax): the latest two and the best one, verified by checksums."""

import contextlib
import functools
import itertools
import logging
import math
import pathlib
import re
import shutil
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from absl import logging as absl_logging
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, PyTree, UInt32
from orbax.checkpoint import checkpoint_managers

from hypjax import parallel
from hypjax.errors import UserError, reason, writing
from hypjax.parallel import processes
from hypjax.system import console
from hypjax.system.files import check_json, with_checksum

_OPENINGS = itertools.count()  # Of checkpoints in parts: the same in all processes.
_METADATA = "record"  # Name of the Orbax item with JSON values, next to the trees of arrays.


class _DamagedError(Exception):
    """A checkpoint cannot be read, or differs from what was saved."""


def checksum(tree: PyTree) -> int:
    """CRC-32 of a tree's arrays; Orbax does not notice flipped bits in a file."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        total = zlib.crc32(np.ravel(np.asarray(leaf)).view(np.uint8).data, total)
    return total


def parts_checksum(tree: PyTree) -> int:
    """A checksum of arrays in parts, computed where they lie, and for any mesh the same.

    The mixed bits of each number count with an odd weight of its position, modulo 2³²: a change of
    one number always changes the sum, and other damage does with a probability of 1 − 2⁻³².
    """
    return int(_weighted_sum(tree))


@jax.jit
def _weighted_sum(tree: PyTree) -> UInt32[Array, ""]:
    def of_array(x: Array) -> Array:
        x = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x
        bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
        position = jnp.uint32(0)
        for axis, size in enumerate(x.shape):
            position = position * size + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
        bits = bits.astype(jnp.uint32)
        # As in MurmurHash3, since two changed signs would cancel: 2³¹ times an odd weight is 2³¹.
        bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
        bits ^= bits >> 13
        return jnp.sum(bits * (2 * position + 1), dtype=jnp.uint32)

    # Arrays that change places would count alike with the same weights.
    total = jnp.uint32(0)
    for x in jax.tree.leaves(tree):
        total = 31 * total + of_array(x)
    return total


class Restored(NamedTuple):
    """A restored checkpoint."""

    step: int
    trees: tuple[PyTree, ...]  # In the order of the request.
    record: dict[str, Any]  # The JSON values that were passed to `Checkpoints.save`.


class Checkpoints:
    """The latest two checkpoints of a run and the best one; each holds named trees of arrays.

    Saves run in the background; failed saves leave earlier checkpoints intact. All processes call
    the methods together: the first process writes gathered arrays, and broadcasts what it reads.
    But if the `mesh` cuts parameters into parts, and all processes see the folder, each of them
    writes and reads its own parts. If `read_only`, each process reads without the others.
    """

    def __init__(
        self, path: pathlib.Path, *, read_only: bool = False, mesh: Mesh | None = None
    ) -> None:
        self._path = path.absolute()  # Orbax rejects relative paths.
        self._read_only = read_only
        self._saving_step: int | None = None
        self._opened: ocp.CheckpointManager | None = None
        self._reader: ocp.CheckpointManager | None = None
        in_parts = mesh is not None and parallel.num_parts(mesh) > 1 and jax.process_count() > 1
        self._in_parts = in_parts and processes.all_write(self._path.parent)
        if read_only or self._in_parts or processes.is_first():
            # Orbax and asyncio log the tracebacks of failures that this class reports.
            for logger in (absl_logging.get_absl_logger(), logging.getLogger("asyncio")):
                logger.addFilter(_is_not_of_orbax)
            if sys.unraisablehook is sys.__unraisablehook__:
                sys.unraisablehook = _show_unraisable
            with writing(path):
                self._open()

    def _open(self) -> None:
        if not self._read_only:
            self._path.mkdir(parents=True, exist_ok=True)
        index = jax.process_index()
        # Or Orbax would wait for the other processes, which do not save.
        alone = ocp.options.MultiprocessingOptions(index, {index}, f"process_{index}")
        if self._in_parts:
            # With None, Orbax would wait by collectives, which would mix with those of steps. After
            # a failure, processes wait at names of their own, so that names are never used again.
            everyone, name = {*range(jax.process_count())}, f"parts_{next(_OPENINGS)}"
            together = ocp.options.MultiprocessingOptions(0, everyone, name)
            self._opened = self._manager_of(together, cleanup_tmp_directories=True)
            # A process that cannot read must not leave the others waiting.
            self._reader = self._manager_of(alone, read_only=True)
        else:  # Killed processes leave temporary folders.
            self._opened = self._manager_of(alone, cleanup_tmp_directories=not self._read_only)
        # Validation scores by step. An unreadable checkpoint may be the best: `restore_best` tries
        # it first, and reports the damage.
        self._scores: dict[int, float] = {}
        for step in self._steps():
            try:
                score = self._read_metadata(step)["score"]
            except _DamagedError:
                score = math.inf
            if score is not None and not math.isnan(score):
                self._scores[step] = score

    def _manager_of(
        self, processes: ocp.options.MultiprocessingOptions, **options: bool
    ) -> ocp.CheckpointManager:
        settings = ocp.CheckpointManagerOptions(
            # Created asynchronously, a folder that cannot be created costs minutes.
            async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
            create=False,
            multiprocessing_options=processes,
            preservation_policy=self,
            **options,
        )
        return ocp.CheckpointManager(self._path, options=settings)

    @property
    def steps(self) -> list[int]:
        """Steps of all checkpoints, ascending, including one that is being saved."""
        return self._steps() if self._in_parts else processes.from_first(self._steps)

    @property
    def best(self) -> tuple[int, float] | tuple[None, None]:
        """Step and score of the best checkpoint; both None if no checkpoint has a score."""
        step, *_ = processes.from_first(self._best_first) or [None]
        return step, processes.from_first(lambda: self._scores.get(step))

    @property
    def _manager(self) -> ocp.CheckpointManager:
        """Orbax's manager, which only a process that reads or saves has."""
        assert self._opened is not None
        return self._opened

    def _steps(self) -> list[int]:
        return self._once(lambda: sorted(self._manager.all_steps()))

    def _once(self, make: Callable[[], Any]) -> Any:
        """Calls a function, in the first process if all processes are here."""
        return processes.from_first(make) if self._in_parts else make()

    def _best_first(self) -> list[int]:
        """Steps with a score, the highest score first, and of equal scores the latest step."""
        return sorted(self._scores, key=lambda step: (-self._scores[step], -step))

    def should_preserve(
        self, checkpoints: Sequence[Any], *, context: checkpoint_managers.PreservationContext
    ) -> list[bool]:
        """Orbax's policy: keep the latest two and the best."""
        # Orbax's own `BestN` cannot open a folder whose file of scores is damaged.
        preserved = {checkpoint.step for checkpoint in checkpoints[-2:]} | {*self._best_first()[:1]}
        return [checkpoint.step in preserved for checkpoint in checkpoints]

    def save(
        self, step: int, *, record: Mapping[str, Any], score: float | None = None, **trees: PyTree
    ) -> None:
        """Starts to save a checkpoint: trees of arrays, and a record of JSON values."""
        if self._in_parts:
            checksums = {name: parts_checksum(tree) for name, tree in trees.items()}
        else:
            trees = jax.tree.map(self._to_host, trees)
            if self._opened is None:
                return
            checksums = {name: checksum(tree) for name, tree in trees.items()}
        self.wait()
        if score is not None and math.isnan(score):  # NaN is neither larger nor smaller.
            score = None
        metadata = {
            "score": score,
            "in_parts": self._in_parts,
            "checksums": checksums,
            "shapes": {name: _shapes(tree) for name, tree in trees.items()},
            "record": record,
        }
        items = {name: ocp.args.StandardSave(tree) for name, tree in trees.items()}
        items[_METADATA] = ocp.args.JsonSave(with_checksum(metadata))
        self._saving_step = step
        if score is not None:
            self._scores[step] = score
        composite = ocp.args.Composite(**items)
        self._attempt(lambda: self._manager.save(step, args=composite, force=True))

    def _to_host(self, array: Any) -> np.ndarray | None:
        """Copies an array to the host of the process that saves; all processes call it together.

        Devices never hold more than one array whole, if parameters lie in parts.
        """
        if not getattr(array, "is_fully_addressable", True):
            array = parallel.gather(array)
        # Of a jax.Array, Orbax expects every process to save its part. Orbax copies NumPy arrays
        # before it returns: the next step overwrites the state.
        return None if self._opened is None else np.asarray(array)

    def wait(self) -> None:
        """Waits until the current save is complete; warns if the save fails."""
        if self._saving_step is not None and self._attempt(self._manager.wait_until_finished):
            self._saving_step = None

    def _attempt(self, action: Callable[[], object]) -> bool:
        """Runs one stage of a save; returns whether it succeeds, and warns if it fails."""
        cause = ""
        try:
            action()
        except Exception as error:  # TensorStore raises a ValueError if the disk is full.
            cause = reason(error)
        if not (cause := self._of_all(cause)):
            return True
        problem = f"the state after step {self._saving_step} could not be saved in {self._path}"
        console.warn(f"{problem} ({cause}); the run continues to the next checkpoint")
        if self._saving_step is not None:
            self._scores.pop(self._saving_step, None)
        self._saving_step = None
        with contextlib.suppress(Exception):  # The old manager would also fail in later saves.
            self._open()
        return False

    def _of_all(self, problem: str) -> str:
        """The first problem that one of the processes that save together has; '' if none has."""
        return processes.first_text(problem) if self._in_parts else problem

    def restore_latest(self, **like: PyTree | None) -> Restored | None:
        """Reads the latest intact checkpoint; None if the folder has no checkpoints.

        `like` holds trees of arrays or `jax.ShapeDtypeStruct`s, with shapes and shardings. If
        `read_only`, a tree may be None, and is then returned as nested dictionaries. Damaged
        checkpoints are reported and, unless `read_only`, moved out of the folder. If all are
        damaged, raises a `UserError` and moves nothing.
        """
        return self._broadcast(lambda: self._first_intact(self._steps()[::-1], like), like)

    def restore_best(self, best_step: int | None = None, **like: PyTree | None) -> Restored | None:
        """Reads the best intact checkpoint, like `restore_latest`; None if none has a score.

        Warns if it is not that of `best_step`, the step that results or a later record name.
        """
        # Only the process that reads knows the scores.
        restored = self._broadcast(lambda: self._first_intact(self._best_first(), like), like)
        if best_step is not None and (restored is None or restored.step != best_step):
            instead = "the last one" if restored is None else f"that of step {restored.step}"
            problem = f"the best checkpoint in {self._path}, of step {best_step}, cannot be read"
            console.warn(f"{problem}; {instead} is taken as the best")
        return restored

    def _first_intact(self, steps: Sequence[int], like: dict[str, PyTree]) -> Restored | None:
        """Reads checkpoints in the order of `steps` until one is intact; moves damaged ones."""
        restored, damage_by_step = None, {}
        for step in steps:
            try:
                restored = self._restore(step, like)
                break
            except _DamagedError as error:
                damage_by_step[step] = str(error)
        if damage_by_step and damage_by_step.keys() == {*self._steps()}:
            last_damage = damage_by_step[max(damage_by_step)]
            details = f"steps {', '.join(map(str, damage_by_step))}: {last_damage}"
            advice = "restore a backup, or start over in another folder with --workdir"
            raise UserError(f"every checkpoint in {self._path} is damaged ({details}); {advice}")
        for step, damage in damage_by_step.items():
            problem = f"the checkpoint of step {step} in {self._path} is damaged ({damage})"
            instead = f"; that of step {restored.step} is used" if restored else ""
            console.warn(problem + instead)
            self._scores.pop(step, None)
            if not self._read_only:
                target = self._path.parent / f"damaged-step-{step}"
                self._once(functools.partial(self._move, step, target))
                self._manager.reload()
        return restored

    def _move(self, step: int, target: pathlib.Path) -> None:
        with writing(target):
            shutil.rmtree(target, ignore_errors=True)
            (self._path / str(step)).rename(target)

    def _broadcast(
        self, read: Callable[[], Restored | None], like: dict[str, PyTree]
    ) -> Restored | None:
        """Reads a checkpoint in the first process and broadcasts it, unless each process reads."""
        if self._read_only:
            return read()
        if self._in_parts:
            if (own := read()) is None:
                return None
            return own._replace(trees=jax.tree.map(_place_like, own.trees, tuple(like.values())))
        expected, restored = tuple(like.values()), Restored(-1, (), {})

        def read_once() -> tuple[int, dict[str, Any]] | None:
            nonlocal restored
            if (checkpoint := read()) is None:
                return None
            restored = checkpoint
            return checkpoint.step, checkpoint.record

        if (step_and_record := processes.from_first(read_once)) is None:
            return None
        trees = processes.arrays_from_first(lambda: restored.trees, expected)
        step, record = step_and_record
        return Restored(step, jax.tree.map(_place_like, trees, expected), record)

    def _restore(self, step: int, like: dict[str, PyTree]) -> Restored:
        """Reads trees of one checkpoint in this process; raises `_DamagedError` if they changed.

        Arrays are read to the host, since they may have been saved on other devices, and returned
        uncommitted, like new ones: committed arrays would compile a second train step. But of
        arrays that were saved in parts, a process that reads in parts only reads its own.
        """
        metadata = self._read_metadata(step)
        shapes = metadata["shapes"]
        like = {n: _tree_of(shapes[n]) if tree is None else tree for n, tree in like.items()}
        if any(shapes[name] != _shapes(tree) for name, tree in like.items()):
            # Orbax would cut or fill the arrays.
            problem = f"the checkpoints in {self._path} are of another encoder or objective"
            raise UserError(f"{problem}; pass the encoder and the objective that were trained")
        were_in_parts = metadata.get("in_parts", False)
        reads_parts = self._in_parts and were_in_parts
        saved = self._read(step, like if reads_parts else jax.tree.map(_on_host, like))
        of_tree = parts_checksum if were_in_parts else checksum
        for name in like:
            if of_tree(saved[name]) != metadata["checksums"][name]:
                raise _DamagedError(f"{name} differs from the saved arrays")
        trees = [saved[name] for name in like]
        trees = trees if self._in_parts else jax.device_put(trees)
        return Restored(step, tuple(trees), metadata["record"])

    def _read_metadata(self, step: int) -> dict[str, Any]:
        try:
            return check_json(dict(self._read(step, {})[_METADATA] or {}))
        except ValueError as error:
            raise _DamagedError("its record differs from the saved record") from error

    def _read(self, step: int, like: Mapping[str, PyTree]) -> Any:
        items = {name: ocp.args.StandardRestore(tree) for name, tree in like.items()}
        items[_METADATA] = ocp.args.JsonRestore()
        damage = ""
        try:
            reader = self._reader or self._manager
            read = reader.restore(step, args=ocp.args.Composite(**items))
        except Exception as error:  # Exceptions depend on the kind of damage.
            # TensorStore names its drivers and files before the cause, and its settings after it.
            text = re.split(r" \[(?:tensorstore_spec|source locations)", reason(error))[0]
            damage = re.split(r'": |" driver: ', text)[-1] or type(error).__name__
        if damage := self._of_all(damage):
            raise _DamagedError(damage)
        return read

    def close(self) -> None:
        """Waits until the current save is complete, and closes the manager.

        A process that fails closes alone: the others are in a step.
        """
        self._in_parts = False
        self.wait()
        for manager in filter(None, (self._opened, self._reader)):
            manager.close()


def _show_unraisable(error: Any) -> None:
    # Orbax closes its event loop at the first array that cannot be read; TensorStore, which reads
    # the others in threads, reports the loop as closed for each.
    if str(error.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(error)


def _is_not_of_orbax(log: logging.LogRecord) -> bool:
    text = f"{log.pathname} {log.getMessage()}"
    return "/orbax/checkpoint/" not in text and ".orbax-checkpoint-tmp" not in text


def _shapes(tree: PyTree) -> dict[str, list[Any]]:
    """Shape and dtype of each leaf of a tree, by its path, as JSON."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): [[*leaf.shape], str(leaf.dtype)]
        for path, leaf in jax.tree.leaves_with_path(tree)
    }


def _tree_of(shapes: Mapping[str, Sequence[Any]]) -> PyTree:
    """Nested dictionaries of `jax.ShapeDtypeStruct`s: the inverse of `_shapes`."""
    leaves = {path: jax.ShapeDtypeStruct(shape, dtype) for path, (shape, dtype) in shapes.items()}
    return flax.traverse_util.unflatten_dict(leaves, sep="/")


def _on_host(leaf: Any) -> np.ndarray:
    return np.empty(leaf.shape, leaf.dtype)


def _place_like(array: Any, like: Any) -> Any:
    sharding = getattr(like, "sharding", None)
    return parallel.place(array, sharding) if isinstance(sharding, NamedSharding) else array
