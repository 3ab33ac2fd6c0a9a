"""A run's folder: its identity, and the state of its last checkpoint (orbax)."""

import json
import pathlib
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import PyTree
from ml_collections import ConfigDict

from hypjax.config import differences, flatten, identity
from hypjax.errors import UserError
from hypjax.reporting import write_json

_CONFIG = "config.json"
_RESULTS = "results.json"
_CHECKPOINTS = "checkpoints"


class Workdir:
    """Everything a run keeps, in one folder."""

    def __init__(
        self, path: pathlib.Path, config: ConfigDict, compared: tuple[str, ...] = ("",)
    ) -> None:
        """Opens a run's folder, whether it exists or not; nothing is written yet.

        Args:
            path: The folder.
            config: The run's configuration.
            compared: What the names of those fields begin with that must be as the run has them.

        Raises:
            UserError: The folder belongs to a run with another configuration.
        """
        self.path = path.absolute()
        self._config = config
        self._check_identity(compared)

    def _check_identity(self, compared: tuple[str, ...]) -> None:
        saved = self.path / _CONFIG
        if not saved.exists():
            return
        changes = differences(json.loads(saved.read_text())["identity"], identity(self._config))
        changes = [change for change in changes if change.startswith(compared)]
        if changes:
            raise UserError(
                f"{self.path} holds a run with another configuration ({'; '.join(changes)}); "
                "repeat its settings, or name another folder with --workdir"
            )

    def create(self) -> None:
        """Makes the folder and writes the configuration into it.

        Raises:
            UserError: The folder cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            fields = {"identity": identity(self._config), "all": flatten(self._config)}
            write_json(self.path / _CONFIG, fields)
        except OSError as error:
            raise UserError(f"cannot write to {self.path}: {error.strerror}") from error

    @property
    def results(self) -> dict[str, Any] | None:
        """What a finished run found; None while it is not finished."""
        path = self.path / _RESULTS
        return json.loads(path.read_text()) if path.exists() else None

    def write_results(self, results: dict[str, Any]) -> None:
        """Marks the run as finished."""
        write_json(self.path / _RESULTS, results)

    @property
    def has_checkpoint(self) -> bool:
        """Whether there is a state to restore."""
        return any(path.name.isdigit() for path in (self.path / _CHECKPOINTS).glob("*"))

    def checkpoints(self) -> "Checkpoints":
        """The checkpoints in the folder, which is made where it does not exist."""
        return Checkpoints(self.path / _CHECKPOINTS)


class Checkpoints:
    """The latest state of a run, as named trees that can be read apart."""

    def __init__(self, path: pathlib.Path) -> None:
        """Opens a folder of checkpoints."""
        options = ocp.CheckpointManagerOptions(max_to_keep=1)
        self._manager = ocp.CheckpointManager(path, options=options)

    @property
    def latest_step(self) -> int | None:
        """Steps done at the latest checkpoint; None where there is none."""
        return self._manager.latest_step()

    def save(self, step: int, **trees: PyTree) -> None:
        """Starts to write a state; the one before is deleted once this one is complete."""
        items = {name: ocp.args.StandardSave(tree) for name, tree in trees.items()}
        self._manager.save(step, args=ocp.args.Composite(**items), force=True)

    def restore(self, **like: PyTree) -> tuple[PyTree, ...]:
        """Reads trees of the latest state, in the order they are asked for.

        They come by way of the host, so that they may have been saved on other devices, and are
        left free to move, like new ones: committed arrays would compile a second train step.

        Args:
            **like: Trees of the same structure, shapes and dtypes, of arrays or of what
                `jax.eval_shape` returns.
        """
        host = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), like)
        items = {name: ocp.args.StandardRestore(tree) for name, tree in host.items()}
        restored = self._manager.restore(self.latest_step, args=ocp.args.Composite(**items))
        return tuple(jax.device_put(restored[name]) for name in like)

    def close(self) -> None:
        """Waits until everything is written."""
        self._manager.close()
