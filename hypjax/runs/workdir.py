"""A run's folder: its configuration, its lock and its results."""

import contextlib
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from hypjax.config import FITTED, differences, flatten, for_files, identity, validate
from hypjax.config.defaults import default_config
from hypjax.errors import UserError, writing
from hypjax.geometry import Space
from hypjax.geometry.registry import describe_space, space_of
from hypjax.objectives import OBJECTIVES
from hypjax.parallel import processes
from hypjax.runs import files
from hypjax.runs.checkpoints import Checkpoints
from hypjax.runs.cloud_copy import CloudCopy
from hypjax.system import console, machine
from hypjax.system.cloud import is_url
from hypjax.system.files import absolute, locked, write_json

# Space in which evaluation compares head outputs: in hypjax.json with learned scalars; in
# config.json, which is written before training, with their first values.
SPACE, FIRST_SPACE = "score_space", "score_space_before_training"
_STARTS = "run.json"


def saved_config(workdir: pathlib.Path) -> ConfigDict:
    """Reads and validates the configuration of the run in a folder."""
    config = read_saved_config(workdir)
    validate(config)
    return config


def read_saved_config(workdir: pathlib.Path) -> ConfigDict:
    """Reads a run's configuration without validation; a published model has the default `run`."""
    fields = _required(workdir)["all"]
    published = files.is_published(workdir)
    if published:
        fields = {name: x for name, x in fields.items() if not name.startswith("run.")}
    with files.damage_explained(_config_path(workdir)):
        config = default_config(fields["objective.name"])
        default_side = config.data.image_size
        if fields["objective.name"] not in OBJECTIVES:  # Only the file knows its fields.
            prefix = "objective."
            saved = {n.removeprefix(prefix): x for n, x in fields.items() if n.startswith(prefix)}
            with config.ignore_type(), config.unlocked():
                config.objective.update(saved)
        set_fields(config, fields)
        if published:  # Batches of as many pixels as by default.
            scale = min(1, default_side / config.data.image_size)
            config.run.eval_batch_size = max(1, int(config.run.eval_batch_size * scale**2))
        return config


def saved_space(workdir: pathlib.Path) -> Space:
    """Reads the space in which evaluation compares head outputs of the run in a folder.

    Unless the model is published, learned scalars have their values before training.
    """
    saved = _required(workdir)
    with files.damage_explained(_config_path(workdir)):
        if (space := saved.get(SPACE) or saved.get(FIRST_SPACE)) is None:
            raise ValueError(f"it names no {FIRST_SPACE}")
        try:
            return space_of(space)
        except KeyError as error:
            problem = f"the run's space {error.args[0]} is unknown here"
            raise UserError(f"{problem}; call hypjax.register_space first") from error


def saved_fields(workdir: pathlib.Path) -> dict[str, Any]:
    """The fields of a run's configuration, by dotted name, as JSON; {} if the folder has no run."""
    return (_saved(workdir) or {"all": {}})["all"]


def set_fields(config: ConfigDict, fields: Mapping[str, Any]) -> None:
    """Copies fields of a saved configuration."""
    with config.ignore_type():
        config.update_from_flattened_dict({name: _tuples(x) for name, x in fields.items()})


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def saved_fingerprint(workdir: pathlib.Path) -> str | None:
    """Fingerprint of the images of the run in a folder; None if unknown."""
    return (_saved(workdir) or {"provenance": {}})["provenance"].get("images")


def read_warnings(workdir: pathlib.Path) -> list[str]:
    """Reads the distinct warnings of all starts of a run."""
    starts = _starts(workdir)
    return list(dict.fromkeys(text for start in starts for text in start.get("warnings", [])))


def _starts(workdir: pathlib.Path) -> list[dict[str, Any]]:
    last = files.read_object(workdir / _STARTS)
    return [*last.pop("earlier_starts", []), last] if last else []


def has_checkpoint(workdir: pathlib.Path) -> bool:
    """Whether a folder holds a checkpoint."""
    return any(path.name.isdigit() for path in (workdir / files.CHECKPOINTS).glob("*"))


def require_identity(
    workdir: pathlib.Path, config: ConfigDict, compared: tuple[str, ...] = ("",)
) -> None:
    """Refuses a folder whose run differs in fields with these prefixes; accepts a new folder."""
    if not (saved := saved_fields(workdir)):
        if has_checkpoint(workdir) or (workdir / files.RESULTS).exists():
            problem = f"{workdir} holds a run without its {files.CONFIG}"
            raise UserError(f"{problem}; restore it, or train in another folder (--workdir)")
        return
    now = identity(config)
    now |= {field: saved.get(field) for field in FITTED if now[field] is None}
    began = {field: value for field, value in saved.items() if not field.startswith("run.")}
    if changes := [change for change in differences(began, now) if change.startswith(compared)]:
        advice = "use the same settings, or train in another folder (hypjax.main --workdir)"
        if any(change.startswith("data.path: ") for change in changes):
            advice = f"spell paths as before; {advice}"
        if all(change.startswith("train.total_steps") for change in changes):
            start = f"--config.model.weights={workdir} --config.model.load_head=True"
            advice += f", where {start} starts from this run's model"
        problem = f"{workdir} holds a run with another configuration ({'; '.join(changes)})"
        raise UserError(f"{problem}; {advice}")


def require_provenance(workdir: pathlib.Path, provenance: Mapping[str, str]) -> None:
    """Refuses other images or precision than a run began with; warns of other code."""
    saved = (_saved(workdir) or {}).get("provenance")
    changed = {name: now for name, now in provenance.items() if saved and saved.get(name) != now}
    for name, now in changed.items():
        remedy = "name another folder with --workdir"
        if name in ("loss", "encoder"):
            problem = f"the code of the {name} has changed since the run in {workdir} began"
            console.warn(f"{problem}; if results change with it, {remedy}")
            continue
        problem = f"the {name} have changed since the run in {workdir} began"
        if name == "precision":
            problem = f"the run in {workdir} uses {saved.get(name)}, but this device {now}"
        raise UserError(f"{problem}; continue as it began, or {remedy}")


def _config_path(workdir: pathlib.Path) -> pathlib.Path:
    return workdir / (files.PUBLISHED if files.is_published(workdir) else files.CONFIG)


def _saved(workdir: pathlib.Path) -> dict[str, Any] | None:
    saved = files.read_object(path := _config_path(workdir))
    with files.damage_explained(path):
        if saved is not None and not isinstance(saved.get("all"), dict):
            raise ValueError("it was not written by hypjax")
    return saved


def _required(workdir: pathlib.Path) -> dict[str, Any]:
    if (saved := _saved(workdir)) is None:
        problem = f"holds no run (there is no {files.CONFIG})"
        problem = problem if workdir.exists() else "does not exist"
        raise UserError(f"{workdir} {problem}; train first, or name a run's folder")
    return saved


class Workdir:
    """Folder of a run that is trained; all processes call each method, the first has the files."""

    def __init__(self, workdir: str | pathlib.Path, config: ConfigDict) -> None:
        """Opens the folder, which may not exist yet; refuses another run's folder."""
        self._config = config
        self._cloud: CloudCopy | None = None
        path, self.location = processes.from_first(lambda: self._open(workdir))
        self.path = pathlib.Path(path)

    def _open(self, workdir: str | pathlib.Path) -> tuple[str, str]:
        folder = absolute(pathlib.Path(workdir))
        location = str(folder)
        if is_url(workdir):
            self._cloud = CloudCopy(workdir)
            folder, location = self._cloud.folder, self._cloud.location
        require_identity(folder, self._config)
        return str(folder), location

    @property
    def results(self) -> dict[str, Any] | None:
        """Results of the finished run; None while it is not finished."""
        return processes.from_first(lambda: files.read_results(self.path / files.RESULTS))

    @property
    def has_checkpoint(self) -> bool:
        """Whether there is a state to restore."""
        return processes.from_first(lambda: has_checkpoint(self.path))

    def filled(self) -> ConfigDict:
        """The configuration with the fields that the run has fitted to its images."""
        config = self._config.copy_and_resolve_references()
        began = processes.from_first(lambda: saved_fields(self.path))
        unset = [field for field in FITTED if flatten(config)[field] is None]
        config.update_from_flattened_dict({f: began[f] for f in unset if f in began})
        return config

    @contextlib.contextmanager
    def locked(
        self,
        provenance: Mapping[str, str],
        filled: ConfigDict | None = None,
        space: Space | None = None,
    ) -> Iterator[Checkpoints]:
        """Locks the folder, writes its config.json, and yields its checkpoints.

        `filled` is the configuration with the fields that were fitted to the images; `space` is the
        objective's `score_space`, which evaluation needs where the code of a loss is missing.
        """
        fields = {"provenance": dict(provenance), "all": for_files(filled or self._config)}
        fields[FIRST_SPACE] = space and describe_space(space)
        with contextlib.ExitStack() as stack:

            def lock_and_begin() -> None:
                stack.enter_context(locked(self.path))
                # Another process may have begun meanwhile.
                require_identity(self.path, self._config)
                require_provenance(self.path, provenance)
                now = machine.describe(self._config.seed)
                with writing(self.path):
                    write_json(self.path / files.CONFIG, fields)
                    earlier = {"earlier_starts": _starts(self.path)}
                    write_json(self.path / _STARTS, now | earlier)
                if self._cloud:
                    stack.enter_context(self._cloud)

            processes.from_first(lock_and_begin)
            checkpoints = Checkpoints(self.path / files.CHECKPOINTS)
            yield stack.enter_context(contextlib.closing(checkpoints))

    def require_last_state(self, checkpoints: Checkpoints, total: int) -> None:
        """Waits until the state after the last step is saved, or refuses to go on."""
        checkpoints.wait()
        if not processes.from_first((self.path / files.CHECKPOINTS / str(total)).is_dir):
            problem = f"the last state could not be saved in {self.path}"
            raise UserError(f"{problem}; make room, and run this again")

    def write_results(self, results: dict[str, Any], warnings: Sequence[str] = ()) -> None:
        """Writes results.json, which marks the run as finished, and the warnings of this start."""

        def write() -> None:
            with console.tolerating(_STARTS):
                start = files.read_object(self.path / _STARTS) or {}
                start["warnings"] = list(dict.fromkeys(warnings))
                write_json(self.path / _STARTS, start)
            with writing(self.path):
                write_json(self.path / files.RESULTS, results)

        processes.from_first(write)
