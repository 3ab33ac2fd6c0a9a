"""States of a run on disk (orbax): the latest two and the best, whole or named as damaged."""

import contextlib
import errno
import functools
import gc
import json
import logging
import os
import pathlib
import shutil
import sys
import tempfile
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from absl import logging as absl_logging
from jax import lax
from jaxtyping import Array, PyTree, UInt32
from orbax.checkpoint import checkpoint_managers

from hypjax.errors import UserError
from hypjax.system import console

_OVERHEAD = 2**16  # Bytes of a checkpoint beside its arrays, roughly.
_RECORD = "record"  # The item beside the trees: what a run remembers apart from arrays.


class Restored(NamedTuple):
    """A state that was read.

    Attributes:
        step: Steps done when it was saved.
        trees: Its trees, in the order they were asked for.
        record: What was saved beside them.
    """

    step: int
    trees: tuple[PyTree, ...]
    record: dict[str, Any]


class DamagedError(Exception):
    """A saved state that cannot be read, or is not what was saved."""


class Checkpoints:
    """The latest two states of a run and the best one, as named trees that can be read apart.

    Saves run in the background. One that fails is told of and leaves those before as they are.
    """

    def __init__(self, path: pathlib.Path, *, read_only: bool = False) -> None:
        """Opens a folder of checkpoints, which is made where it does not exist.

        Args:
            path: The folder.
            read_only: Whether to leave it exactly as it is; it must exist.

        Raises:
            UserError: The folder cannot be made.
        """
        _report_failures_once()
        self._path = path
        self._read_only = read_only
        self._saving: int | None = None
        self._failed: set[int] = set()
        try:
            self._open()
        except OSError as error:
            raise UserError(f"cannot write to {path} ({error.strerror})") from error

    def _open(self) -> None:
        # Where a folder cannot be made, Orbax's background threads would wait for it for minutes.
        at_once = ocp.AsyncOptions(create_directories_asynchronously=False)
        if not self._read_only:
            self._path.mkdir(parents=True, exist_ok=True)
        options = ocp.CheckpointManagerOptions(
            async_options=at_once,
            create=False,
            multiprocessing_options=_alone(),
            cleanup_tmp_directories=not self._read_only,  # What killed processes left half done.
            preservation_policy=None if self._read_only else _LatestTwoAndBest(self),
        )
        self._manager = ocp.CheckpointManager(self._path, options=options)
        self._unreadable: set[int] = set()
        self._scores = {step: self._saved_score(step) for step in self.steps}

    @property
    def steps(self) -> list[int]:
        """Steps done at each checkpoint, ascending; one being saved is among them."""
        return sorted(set(self._manager.all_steps()) - self._failed)

    @property
    def best_step(self) -> int | None:
        """The checkpoint with the highest score, the earliest of equals; None: none has one."""
        scored = [(score, -step) for step, score in self._scores.items() if score is not None]
        return -max(scored)[1] if scored else None

    @property
    def best_score(self) -> float | None:
        """The highest score of any checkpoint."""
        return None if self.best_step is None else self._scores[self.best_step]

    def save(
        self, step: int, *, record: Mapping[str, Any], score: float | None = None, **trees: PyTree
    ) -> None:
        """Starts to save a state; once it is complete, those no longer kept are deleted.

        Args:
            step: Steps done.
            record: What else to remember, as JSON.
            score: On held-out classes; the higher the better. None: not measured.
            **trees: Arrays, by name.
        """
        self.wait()
        facts = {
            "score": score,
            "checksums": {name: int(checksum(tree)) for name, tree in trees.items()},
            "record": record,
        }
        facts["checksum"] = _text_checksum(facts)
        items = {name: ocp.args.StandardSave(tree) for name, tree in trees.items()}
        items[_RECORD] = ocp.args.JsonSave(facts)
        self._saving, self._scores[step] = step, score
        self._failed.discard(step)
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(trees)) + _OVERHEAD
        composite = ocp.args.Composite(**items)
        if self._attempt(lambda: _reserve(self._path, size)):
            self._attempt(lambda: self._manager.save(step, args=composite, force=True))

    def wait(self) -> None:
        """Waits until what is being saved is complete, or warns that it cannot be."""
        if self._saving is not None and self._attempt(self._manager.wait_until_finished):
            self._saving = None

    def _attempt(self, action: Callable[[], object]) -> bool:
        """Takes part in saving; a failure is told of, and ends what is being saved."""
        try:
            action()
            return True
        except Exception as error:  # TensorStore's for a full disk is a ValueError.
            reason = _reason(error)
        self._give_up(reason)
        return False

    def _give_up(self, reason: str) -> None:
        """Tells of a save that failed, and removes what there is of it."""
        step, self._saving = self._saving, None
        self._failed.add(step)
        del self._scores[step]
        console.warn(
            f"the state after step {step} could not be saved in {self._path} ({reason}); "
            "the next checkpoint is the next attempt"
        )
        with contextlib.suppress(Exception):
            self._manager.close()
        with warnings.catch_warnings(action="ignore"):
            gc.collect()  # Of the coroutines that Orbax stopped, which would warn at any time.
        for unfinished in self._path.glob("*.orbax-checkpoint-tmp*"):
            shutil.rmtree(unfinished, ignore_errors=True)
        with contextlib.suppress(Exception):  # What is read-only now may be mended later.
            self._open()

    def restore_latest(self, **like: PyTree) -> Restored | None:
        """Reads the latest state that is not damaged; None where nothing was ever saved.

        Later ones, which are damaged, are named and put aside, unless the folder is read only.

        Args:
            **like: Trees of the same structure, shapes and dtypes, of arrays or of what
                `jax.eval_shape` returns.

        Raises:
            UserError: All are damaged; they are left where they are.
        """
        damaged = {}
        for step in reversed(self.steps):
            try:
                restored = self.restore(step, **like)
            except DamagedError as error:
                damaged[step] = str(error)
                continue
            for late, why in damaged.items():
                self._put_aside(late, why)
            for early in sorted(self._unreadable & set(self.steps) - damaged.keys()):
                self._put_aside(early, "its record cannot be read")
            return restored
        if damaged:
            raise UserError(
                f"every checkpoint in {self._path} is damaged (steps "
                f"{', '.join(map(str, damaged))}: {damaged[max(damaged)]}); nothing was changed: "
                "bring a copy back, or name another folder with --workdir to begin anew"
            )
        return None

    def restore(self, step: int, **like: PyTree) -> Restored:
        """Reads trees of one state.

        They come by way of the host, so that they may have been saved on other devices, and are
        left free to move, like new ones: committed arrays would compile a second train step.

        Raises:
            DamagedError: It cannot be read, or is not what was saved.
        """
        host = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), like)
        items = {name: ocp.args.StandardRestore(tree) for name, tree in host.items()}
        try:
            args = ocp.args.Composite(**items, record=ocp.args.JsonRestore())
            read = self._manager.restore(step, args=args)
            facts = _whole(read[_RECORD])
            sums = {name: facts["checksums"][name] for name in like}
            trees = {name: read[name] for name in like}
        except Exception as error:  # Each kind of damage has a kind of exception.
            raise DamagedError(_reason(error)) from error
        trees = jax.device_put(trees)
        for name, tree in trees.items():
            if int(checksum(tree)) != sums[name]:
                raise DamagedError(f"its {name} differs from what was saved")
        return Restored(step, tuple(trees.values()), facts["record"])

    def restore_best(self, **like: PyTree) -> Restored | None:
        """Reads trees of the best state; None where there is none.

        Where it is damaged, it is named and put aside, and the best of the others is read.
        """
        while self.best_step is not None:
            try:
                return self.restore(self.best_step, **like)
            except DamagedError as error:
                self._put_aside(self.best_step, str(error))
        return None

    def _saved_score(self, step: int) -> float | None:
        """The score saved with a state, if that can still be read."""
        try:
            args = ocp.args.Composite(record=ocp.args.JsonRestore())
            return _whole(self._manager.restore(step, args=args)[_RECORD])["score"]
        except Exception:  # Each kind of damage has a kind of exception.
            self._unreadable.add(step)
            return None

    def _put_aside(self, step: int, why: str) -> None:
        told = f"the checkpoint of step {step} in {self._path} is damaged ({why})"
        self._scores.pop(step, None)
        if self._read_only:
            console.warn(told + "; another one is used")
            return
        aside = self._path.parent / f"damaged-step-{step}"
        number = 1
        while aside.exists():
            number += 1
            aside = self._path.parent / f"damaged-step-{step}-{number}"
        try:
            (self._path / str(step)).rename(aside)
        except OSError as error:
            console.warn(f"{told} and could not be put aside ({error.strerror})")
            return
        self._manager.reload()
        console.warn(f"{told} and was put aside as {aside.name}; another one is used")

    def kept_anyway(self) -> set[int | None]:
        """The best checkpoint, and damaged ones, which may yet be mended."""
        return {self.best_step, *self._unreadable}

    def close(self) -> None:
        """Waits until everything is saved."""
        self.wait()
        self._manager.close()


def _alone() -> ocp.options.MultiprocessingOptions:
    """Has Orbax not wait for the other processes of a run, which take no part in what it does."""
    if jax.process_count() == 1:
        return ocp.options.MultiprocessingOptions()
    own = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=own, active_processes={own}, barrier_sync_key_prefix=f"process_{own}"
    )


class _LatestTwoAndBest:
    """Orbax's preservation policy of these checkpoints."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints

    def should_preserve(
        self,
        checkpoints: Sequence[Any],
        *,
        context: checkpoint_managers.PreservationContext,
    ) -> list[bool]:
        """Whether to keep each checkpoint of an ascending list."""
        del context
        kept = {info.step for info in checkpoints[-2:]}
        kept |= self._checkpoints.kept_anyway()
        return [info.step in kept for info in checkpoints]


@jax.jit
def checksum(tree: PyTree) -> UInt32[Array, ""]:
    """A number that changes with any single bit of a tree's arrays; computed where they lie.

    The words of an array are mixed one by one, as hash functions do it, and summed with odd weights
    that tell their place, modulo 2³².
    """
    total = jnp.uint32(0)
    for place, leaf in enumerate(jax.tree.leaves(tree)):
        leaf = leaf.astype(jnp.uint8) if leaf.dtype == bool else leaf
        word = jnp.dtype(f"uint{8 * min(leaf.dtype.itemsize, 4)}")
        words = lax.bitcast_convert_type(leaf, word).astype(jnp.uint32).reshape(-1)
        words = (words ^ (words >> 16)) * jnp.uint32(0x85EBCA6B)
        words = words ^ (words >> 13)
        weights = 2 * lax.iota(jnp.uint32, words.size) + 1
        total += jnp.uint32(2 * place + 1) * jnp.sum(words * weights, dtype=jnp.uint32)
    return total


def _reason(error: Exception) -> str:
    """What went wrong, in a few words."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = str(error)
    if "No space left" in text or "RESOURCE_EXHAUSTED" in text:
        return "No space left on device"
    return text.splitlines()[0][:120] if text else type(error).__name__


def _text_checksum(facts: Mapping[str, Any]) -> int:
    told = {name: value for name, value in facts.items() if name != "checksum"}
    return zlib.crc32(json.dumps(told, sort_keys=True).encode())


def _whole(facts: dict[str, Any]) -> dict[str, Any]:
    if _text_checksum(facts) != facts["checksum"]:
        raise DamagedError("its record differs from what was saved")
    return facts


def _reserve(path: pathlib.Path, size: int) -> None:
    """Raises an `OSError` where a folder cannot take as many bytes."""
    with tempfile.TemporaryFile(dir=path) as probe:
        try:
            os.posix_fallocate(probe.fileno(), 0, size)
        except (AttributeError, OSError) as error:  # macOS, and some network file systems.
            full = errno.ENOSPC, "No space left on device"
            if getattr(error, "errno", None) not in (None, errno.EOPNOTSUPP, errno.EINVAL):
                raise
            if shutil.disk_usage(path).free < size:
                raise OSError(*full) from error


@functools.cache
def _report_failures_once() -> None:
    """Drops what Orbax's and TensorStore's threads print of failures that are told of here."""
    absl_logging.get_absl_logger().addFilter(_is_news)
    logging.getLogger("asyncio").addFilter(_is_news)
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            before(unraisable)

    sys.unraisablehook = hook


def _is_news(record: logging.LogRecord) -> bool:
    told = "OCDBT" in record.getMessage() or ".orbax-checkpoint-tmp" in record.getMessage()
    return not told and "orbax/checkpoint/_src/futures" not in record.pathname
