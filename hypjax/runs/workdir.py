"""A run's folder: its configuration, its lock and its results."""

import contextlib
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict

from hypjax.config import FITTED, default_config, differences, flatten, identity, validate
from hypjax.errors import UserError
from hypjax.runs.checkpoints import Checkpoints
from hypjax.system import environment
from hypjax.system.files import write_json
from hypjax.system.locks import claimed_or_refused

_CONFIG = "config.json"
_RESULTS = "results.json"
_PROVENANCE = "run.json"
_CHECKPOINTS = "checkpoints"
_LONGER = (
    ", where --config.model.weights={} --config.model.load_head=True starts from this run's model"
)


def saved_config(workdir: pathlib.Path) -> ConfigDict:
    """Reads the configuration of the run in a folder.

    Fields that were added since get their defaults.

    Raises:
        UserError: The folder holds no run, or a run that this version cannot read.
    """
    path = workdir / _CONFIG
    try:
        fields = json.loads(path.read_text())["all"]
    except OSError as error:
        raise UserError(f"{workdir} holds no run ({_CONFIG}: {error.strerror})") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged, or was not written by hypjax") from error
    fields.setdefault("model.architecture", "vit")  # Older runs lack the field.
    config = default_config()
    for field in sorted(fields.keys() - flatten(config).keys()):
        raise UserError(f"{path} has the field {field}, which this version of hypjax does not know")
    fields = {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
    with config.unlocked(), config.ignore_type():
        config.update_from_flattened_dict(fields)
    validate(config)
    return config


class Workdir:
    """The folder with everything that a run keeps."""

    def __init__(
        self, path: pathlib.Path, config: ConfigDict, compared: tuple[str, ...] = ("",)
    ) -> None:
        """Opens a run's folder, which need not exist; writes nothing yet.

        Args:
            path: The folder.
            config: The run's configuration.
            compared: Prefixes of the fields that must equal those of the run in the folder.

        Raises:
            UserError: The folder belongs to a run with another configuration, or is damaged.
        """
        self.path = path.absolute()
        self._config = config
        self._require_same_identity(compared)

    def _require_same_identity(self, compared: tuple[str, ...] = ("",)) -> None:
        """Raises an error if fields with certain prefixes differ from the run in the folder."""
        saved = self._read(_CONFIG)
        if saved is None:
            return
        if "identity" not in saved:
            raise UserError(
                f"{self.path / _CONFIG} was not written by hypjax; name another --workdir"
            )
        # A field that was added since the run began has had its default.
        began = identity(default_config()) | saved["identity"]
        changes = differences(began, identity(self._config))
        changes = [change for change in changes if change.startswith(compared)]
        if changes:
            longer = all(change.startswith("train.total_steps") for change in changes)
            longer &= (self._config.train.total_steps or 0) > (began["train.total_steps"] or 0)
            raise UserError(
                f"{self.path} holds a run with another configuration ({'; '.join(changes)}); "
                "use the same settings, or name another folder with --workdir"
                + (_LONGER.format(self.path) if longer else "")
            )

    @property
    def fitted(self) -> dict[str, Any]:
        """Fields that were chosen to fit the images when the run in the folder began."""
        began = (self._read(_CONFIG) or {"all": {}})["all"]
        unset = [field for field in FITTED if flatten(self._config)[field] is None]
        return {field: began[field] for field in unset if field in began}

    def require(self, circumstances: Mapping[str, str]) -> None:
        """Raises an error if the run was started with other images or another precision.

        Args:
            circumstances: {"images": fingerprint, "precision": dtype}, or one of the two.

        Raises:
            UserError: One of them differs.
        """
        saved = (self._read(_CONFIG) or {}).get("circumstances", {})
        changed = [name for name in circumstances if circumstances[name] != saved.get(name)]
        if saved and "images" in changed:
            raise UserError(
                f"the images have changed since the run in {self.path} began (some were added, "
                "removed or edited); restore them, or name another folder with --workdir"
            )
        if saved and changed:
            raise UserError(
                f"the run in {self.path} computes in {saved['precision']}, but on this device "
                f"model.precision=auto means {circumstances['precision']}; continue the run on a "
                "device of the same kind, or name another folder with --workdir"
            )

    @contextlib.contextmanager
    def claimed(
        self, circumstances: Mapping[str, str], filled: ConfigDict | None = None
    ) -> Iterator[None]:
        """Locks the folder for this process during the body, and writes the configuration.

        The operating system releases the lock when the process ends, for whatever reason.

        Args:
            circumstances: What must not change between resumes besides the configuration, see
                `require`.
            filled: The configuration with the fields filled in that fit the images; by default as
                it is.

        Raises:
            UserError: The folder cannot be written, another process uses it, or the circumstances
                have changed.
        """
        with claimed_or_refused(self.path):
            self._require_same_identity()
            self.require(circumstances)
            try:
                self._write_start(circumstances, filled or self._config)
            except OSError as error:
                raise UserError(f"cannot write to {self.path} ({error.strerror})") from error
            yield

    def _write_start(self, circumstances: Mapping[str, str], filled: ConfigDict) -> None:
        """Writes config.json, and adds this start to run.json."""
        config = {
            "identity": identity(self._config),
            "circumstances": dict(circumstances),
            "all": flatten(filled),
        }
        write_json(self.path / _CONFIG, config)
        earlier = {}
        with contextlib.suppress(UserError):  # The run continues even if the file is damaged.
            earlier = self._read(_PROVENANCE) or {}
        starts = earlier.pop("earlier_starts", []) + ([earlier] if earlier else [])
        now = environment.describe(self._config.seed)
        write_json(self.path / _PROVENANCE, {**now, "earlier_starts": starts})

    @property
    def total_steps(self) -> int | None:
        """Number of steps in the saved configuration; None if there is none."""
        return (self._read(_CONFIG) or {"all": {}})["all"].get("train.total_steps")

    @property
    def results(self) -> dict[str, Any] | None:
        """Results of the run; None until it is finished."""
        return self._read(_RESULTS)

    def write_results(self, results: dict[str, Any]) -> None:
        """Writes results.json, which marks the run as finished.

        Raises:
            UserError: The file cannot be written.
        """
        try:
            write_json(self.path / _RESULTS, results)
        except OSError as error:
            raise UserError(
                f"the results above could not be written to {self.path} ({error.strerror}); "
                "fix that and repeat the command, which then only evaluates the model"
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
                f"{path} is damaged ({error}); restore a backup, or name another folder "
                "with --workdir"
            ) from error

    @property
    def has_checkpoint(self) -> bool:
        """Whether the folder holds a checkpoint."""
        return any(path.name.isdigit() for path in (self.path / _CHECKPOINTS).glob("*"))

    def checkpoints(self, *, read_only: bool = False) -> Checkpoints:
        """Opens the checkpoints in the folder."""
        return Checkpoints(self.path / _CHECKPOINTS, read_only=read_only)
