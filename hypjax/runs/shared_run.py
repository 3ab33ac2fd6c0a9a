"""A run's folder as all its processes see it: only the first one reads and writes it."""

import contextlib
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from hypjax.errors import UserError
from hypjax.parallel import processes
from hypjax.runs.cloud_copy import LocalFolder, open_folder
from hypjax.runs.shared_checkpoints import SharedCheckpoints
from hypjax.runs.workdir import Workdir
from hypjax.system import watchdog


class SharedRun:
    """The folder of a run, possibly in cloud storage. All processes call each method at once.

    Attributes:
        path: The folder on this machine.
        location: The folder or its URL, for messages.
    """

    def __init__(self, workdir: str | pathlib.Path, config: ConfigDict) -> None:
        """Opens the folder; nothing is written yet.

        Args:
            workdir: The folder, or its URL.
            config: The run's configuration.

        Raises:
            UserError: The folder holds a run with another configuration, is damaged or in use, or
                its storage cannot be reached.
        """
        self._first, self._config = processes.is_first(), config
        self._storage = open_folder(workdir) if self._first else LocalFolder(pathlib.Path(workdir))
        compared = ("",) if self._first else ()
        self._folder = Workdir(self._storage.folder, config, compared)
        self.path, self.location = self._folder.path, self._storage.location

    @property
    def results(self) -> dict[str, Any] | None:
        """Results of the finished run; None while it is not finished."""
        return processes.from_first(lambda: self._folder.results)

    def filled(self) -> ConfigDict:
        """The configuration; fields that were chosen to fit the images keep their choice."""
        config = self._config.copy_and_resolve_references()
        config.update_from_flattened_dict(processes.from_first(lambda: self._folder.fitted))
        return config

    @property
    def has_checkpoint(self) -> bool:
        """Whether there is a state to restore."""
        return processes.from_first(lambda: self._folder.has_checkpoint)

    @contextlib.contextmanager
    def claimed(
        self, circumstances: Mapping[str, str], filled: ConfigDict
    ) -> Iterator[SharedCheckpoints]:
        """Claims the folder for this run during the body, and yields its checkpoints.

        Args:
            circumstances: What, apart from the configuration, may not change when the run resumes.
            filled: The configuration with all fields filled in.

        Raises:
            UserError: The folder cannot be written, another process has it, the circumstances have
                changed, or the last copy to the cloud failed.
        """
        with (
            self._folder.claimed(circumstances, filled)
            if self._first
            else contextlib.nullcontext(),
            self._storage,
            contextlib.closing(SharedCheckpoints(self._folder.checkpoints)) as checkpoints,
            watchdog.protected_cleanup(),
        ):
            yield checkpoints

    def require_last_state(self, checkpoints: SharedCheckpoints, total: int) -> None:
        """Waits until the state after the last step is saved.

        Args:
            checkpoints: The run's checkpoints.
            total: Number of the last step.

        Raises:
            UserError: It could not be saved.
        """
        checkpoints.wait()
        steps = checkpoints.steps
        if not processes.from_first(lambda: total in steps and self._folder.has_state(total)):
            saved = [step for step in steps if step < total]
            saved = f"from step {saved[-1]}" if saved else "from the beginning"
            raise UserError(
                f"the last state of this run could not be saved in {self.path}, so the run is not "
                f"finished; make room, and the same command resumes it {saved}"
            )

    def write_warnings(self, warnings: Sequence[str]) -> None:
        """Keeps the warnings of this start in the folder."""
        if self._first:
            self._folder.write_warnings(warnings)

    def write_results(self, results: dict[str, Any]) -> None:
        """Writes the results, which marks the run as finished.

        Raises:
            UserError: They cannot be written.
        """
        processes.from_first(lambda: self._folder.write_results(results))
