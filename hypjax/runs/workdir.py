"""A run's folder: whose it is, who writes it, and what a finished run found."""

import contextlib
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict

from hypjax.config import default_config, differences, flatten, identity, validate
from hypjax.errors import UserError
from hypjax.runs.checkpoints import Checkpoints
from hypjax.system import environment
from hypjax.system.files import write_json
from hypjax.system.locks import LOCK, lock_or_refuse

_CONFIG = "config.json"
_RESULTS = "results.json"
_PROVENANCE = "run.json"
_CHECKPOINTS = "checkpoints"


def saved_config(workdir: pathlib.Path) -> ConfigDict:
    """The configuration of the run in a folder, as the folder tells it.

    Raises:
        UserError: The folder holds no run, or one that this version cannot read.
    """
    path = workdir / _CONFIG
    try:
        fields = json.loads(path.read_text())["all"]
    except OSError as error:
        raise UserError(f"{workdir} holds no run ({_CONFIG}: {error.strerror})") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged, or not one of hypjax") from error
    fields.setdefault("model.architecture", "vit")  # There was no other once.
    config = default_config()
    for field in sorted(fields.keys() - flatten(config).keys()):
        raise UserError(f"{path} has the field {field}, which this version of hypjax does not know")
    fields = {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
    with config.unlocked(), config.ignore_type():
        config.update_from_flattened_dict(fields)
    validate(config)
    return config


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
            UserError: The folder belongs to a run with another configuration, or is damaged.
        """
        self.path = path.absolute()
        self._config = config
        changes = self._changes("identity", identity(config))
        self._refuse([change for change in changes if change.startswith(compared)])

    def _changes(self, part: str, now: Mapping[str, Any]) -> list[str]:
        """In what a part of config.json differs from what it would be now."""
        saved = self._read(_CONFIG)
        if saved is None:
            return []
        if part not in saved:
            raise UserError(f"{self.path / _CONFIG} is not one of hypjax; name another --workdir")
        return differences(saved[part], now)

    def _refuse(self, changes: list[str]) -> None:
        if changes:
            raise UserError(
                f"{self.path} holds a run with another configuration ({'; '.join(changes)}); "
                "repeat its settings, or name another folder with --workdir"
            )

    def require(self, circumstances: Mapping[str, str]) -> None:
        """Refuses circumstances other than the run began in.

        Args:
            circumstances: {"images": fingerprint, "precision": dtype}, or some of them.

        Raises:
            UserError: One differs.
        """
        saved = (self._read(_CONFIG) or {}).get("circumstances", {})
        changed = [name for name in circumstances if circumstances[name] != saved.get(name)]
        if saved and "images" in changed:
            raise UserError(
                f"the images have changed since the run in {self.path} began (some were added, "
                "removed or edited); bring them back, or name another folder with --workdir"
            )
        if saved and changed:
            raise UserError(
                f"the run in {self.path} computes in {saved['precision']} and would go on in "
                f"{circumstances['precision']}, which model.precision=auto means on this device; "
                "continue it on a device like the first, or name another folder with --workdir"
            )

    @contextlib.contextmanager
    def claimed(self, circumstances: Mapping[str, str]) -> Iterator[None]:
        """Makes the folder this process's own during the body, and writes the configuration.

        The operating system ends the claim with the process, however that ends.

        Args:
            circumstances: What, apart from the configuration, must be the same whenever the run
                goes on, such as the images.

        Raises:
            UserError: The folder cannot be written, another process has it, or the circumstances
                have changed.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / LOCK).open("a+b", buffering=0)
        except OSError as error:
            raise UserError(f"cannot write to {self.path} ({error.strerror})") from error
        with lock:
            lock_or_refuse(lock, self.path)
            self._refuse(self._changes("identity", identity(self._config)))
            self.require(circumstances)
            try:
                self._write_beginning(circumstances)
            except OSError as error:
                raise UserError(f"cannot write to {self.path} ({error.strerror})") from error
            yield

    def _write_beginning(self, circumstances: Mapping[str, str]) -> None:
        config = {
            "identity": identity(self._config),
            "circumstances": dict(circumstances),
            "all": flatten(self._config),
        }
        write_json(self.path / _CONFIG, config)
        earlier = {}
        with contextlib.suppress(UserError):  # A damaged one is no reason to stop.
            earlier = self._read(_PROVENANCE) or {}
        starts = earlier.pop("earlier_starts", []) + ([earlier] if earlier else [])
        now = environment.describe(self._config.seed)
        write_json(self.path / _PROVENANCE, {**now, "earlier_starts": starts})

    @property
    def total_steps(self) -> int | None:
        """Steps of the run, as its folder says."""
        return (self._read(_CONFIG) or {"all": {}})["all"].get("train.total_steps")

    @property
    def results(self) -> dict[str, Any] | None:
        """What a finished run found; None while it is not finished."""
        return self._read(_RESULTS)

    def write_results(self, results: dict[str, Any]) -> None:
        """Marks the run as finished.

        Raises:
            UserError: They cannot be written.
        """
        try:
            write_json(self.path / _RESULTS, results)
        except OSError as error:
            raise UserError(
                f"the results above could not be written to {self.path} ({error.strerror}); "
                "mend that, and the same command evaluates the model again"
            ) from error

    def _read(self, name: str) -> dict[str, Any] | None:
        path = self.path / name
        try:
            return json.loads(path.read_text())
        except FileNotFoundError:
            return None
        except NotADirectoryError as error:
            raise UserError(f"{self.path} is a file; --workdir must name a folder") from error
        except OSError as error:
            raise UserError(f"cannot read {path} ({error.strerror})") from error
        except ValueError as error:
            raise UserError(
                f"{path} is damaged ({error}); bring a copy back, or name another folder "
                "with --workdir"
            ) from error

    @property
    def has_checkpoint(self) -> bool:
        """Whether there is a state to restore."""
        return any(path.name.isdigit() for path in (self.path / _CHECKPOINTS).glob("*"))

    def checkpoints(self, *, read_only: bool = False) -> Checkpoints:
        """The checkpoints in the folder."""
        return Checkpoints(self.path / _CHECKPOINTS, read_only=read_only)
