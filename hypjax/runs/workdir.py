"""A run's folder: its configuration, its lock and its results."""

import contextlib
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from hypjax.config import (
    FITTED,
    default_config,
    differences,
    flatten,
    for_files,
    identity,
    validate,
)
from hypjax.errors import UserError, reason, writing
from hypjax.geometry import SPACES
from hypjax.objectives import create_objective
from hypjax.objectives.create import BUILT_IN, SAVED_SPACE, is_known, stand_in
from hypjax.parallel import processes
from hypjax.retrieval.embeddings import describe_space, space_of
from hypjax.runs import files
from hypjax.runs.checkpoints import Checkpoints
from hypjax.runs.cloud_copy import CloudCopy, open_url, reading
from hypjax.system import console, machine
from hypjax.system.files import write_json
from hypjax.system.locks import claimed_or_refused

SPACE = "score_space"  # In config.json: that of the head.
# Fields that all objectives have.
_COMMON = (
    *("name", "space", "c", "learn_c", "c_bounds", "c_rate", "curvatures", "learn"),
    *("clip_radius", "feature_scale"),
)
_STARTS = "run.json"
_LONGER = (
    ", where --config.model.weights={} --config.model.load_head=True starts from this run's model"
)


def saved_config(workdir: pathlib.Path) -> ConfigDict:
    """Reads the configuration of the run in a folder.

    Fields of `config.run` in a published model get their defaults: how it is executed is this
    machine's choice.
    """
    path = _config_path(workdir)
    saved = files.read_object(path)
    if saved is None:
        raise UserError(f"{workdir} holds no run (there is no {files.CONFIG})")
    published = path.name == files.PUBLISHED
    try:
        config = _config_of(saved, published)
        validate(config)
    except UserError:
        raise
    except Exception as error:  # What a file may hold instead has no end.
        raise files.damaged(path, reason(error)) from error
    if published:  # As many pixels as the default has at the default size.
        scale = default_config().data.image_size / config.data.image_size
        config.run.eval_batch_size = max(1, int(config.run.eval_batch_size * min(1, scale**2)))
    return config


def _config_of(saved: Mapping[str, Any], published: bool) -> ConfigDict:
    fields = {name: _tuples(value) for name, value in saved["all"].items()}
    if published:
        fields = {name: v for name, v in fields.items() if not name.startswith("run.")}
    objective, space = fields["objective.name"], saved[SPACE]
    if not is_known(objective):  # The code of a loss of one's own is not needed for searching.
        own = {n.partition(".")[2]: v for n, v in fields.items() if n.startswith("objective.")}
        stand_in(objective, {field: v for field, v in own.items() if field not in _COMMON})
    config = default_config(objective)
    with config.ignore_type():
        config.update_from_flattened_dict(fields)
    if objective not in BUILT_IN:  # Its code may have changed, or be unknown.
        for name in _space_names(space):
            if name not in SPACES:
                raise UserError(
                    f"the run is scored in the space {name}, which is not known in this process; "
                    "register it by hypjax.register_space"
                )
        config[SAVED_SPACE] = space_of(space)
    return config


def saved_architecture(workdir: pathlib.Path) -> object:
    """The `model.architecture` of the run in a folder, known or not; None if it has none."""
    return (files.read_object(_config_path(workdir)) or {"all": {}})["all"].get(
        "model.architecture"
    )


def _space_names(description: Mapping[str, Any]) -> list[str]:
    """Names of the spaces in a value of `describe_space`."""
    if description["name"] != "fused":
        return [description["name"]]
    return [name for part, _ in description["parts"] for name in _space_names(part)]


def read_run_config(workdir: str | pathlib.Path) -> ConfigDict:
    """Reads the configuration of a run in a folder, at a URL or on the hub."""
    with reading(workdir) as folder:
        return saved_config(folder)


def _tuples(value: Any) -> Any:
    """A value of a file, whose lists, and the lists in these, become tuples."""
    if not isinstance(value, list):
        return value
    return tuple(tuple(item) if isinstance(item, list) else item for item in value)


def _config_path(workdir: pathlib.Path) -> pathlib.Path:
    """Path of the configuration of a run, or of a published model, whose config.json is timm's."""
    return workdir / (files.PUBLISHED if files.is_published(workdir) else files.CONFIG)


def saved_fingerprint(workdir: pathlib.Path) -> str | None:
    """Hash of the images of the run in a folder; None if it is not known."""
    saved = files.read_object(_config_path(workdir)) or {"provenance": {}}
    return saved["provenance"].get("images")


def read_warnings(workdir: pathlib.Path) -> list[str]:
    """Reads the warnings of all starts of a run, each once; none if they are not known."""
    last = files.read_object(workdir / _STARTS) or {}
    starts = [*last.get("earlier_starts", []), last]
    return list(dict.fromkeys(text for start in starts for text in start.get("warnings", [])))


class Workdir:
    """The folder with everything that a run keeps."""

    def __init__(
        self, path: pathlib.Path, config: ConfigDict, compared: tuple[str, ...] = ("",)
    ) -> None:
        """Opens a folder, which need not exist; fields with these prefixes must be its run's."""
        self.path = path.absolute()
        self._config = config
        self._require_same_identity(compared)

    @property
    def _saved(self) -> dict[str, Any] | None:
        """What config.json holds; None if there is none."""
        saved = files.read_object(path := _config_path(self.path))
        if saved is not None and "identity" not in saved:  # Another program's file.
            raise files.damaged(path, "it was not written by hypjax")
        return saved

    def _require_same_identity(self, compared: tuple[str, ...] = ("",)) -> None:
        """Raises an error if fields with certain prefixes differ from the run in the folder."""
        saved = self._saved
        if saved is None:
            if self.has_checkpoint or (self.path / files.RESULTS).exists():
                raise UserError(
                    f"{self.path} holds a run without its {files.CONFIG}, so nothing says which "
                    "one it is; restore that file, or name another folder with --workdir"
                )
            return
        began, now = saved["identity"], identity(self._config)
        # What was chosen to fit the images is the run's, too.
        unset = [field for field in FITTED if began[field] is None and now[field] is not None]
        began |= {field: saved["all"][field] for field in unset}
        changes = differences(began, now)
        changes = [change for change in changes if change.startswith(compared)]
        if changes:
            longer = all(change.startswith("train.total_steps") for change in changes)
            longer = longer and self._config.train.total_steps > began["train.total_steps"]
            raise UserError(
                f"{self.path} holds a run with another configuration ({'; '.join(changes)}); "
                "use the same settings, or name another folder with --workdir"
                + (_LONGER.format(self.path) if longer else "")
            )

    @property
    def fitted(self) -> dict[str, Any]:
        """Fields that were chosen to fit the images when the run in the folder began."""
        began = (self._saved or {"all": {}})["all"]
        unset = [field for field in FITTED if flatten(self._config)[field] is None]
        return {field: began[field] for field in unset if field in began}

    def require(self, provenance: Mapping[str, str]) -> None:
        """Refuses other images or precision than the run began with; warns of other code."""
        saved = (self._saved or {}).get("provenance")
        if not saved:
            return
        for name, now in provenance.items():
            began = saved.get(name)
            if now == began:
                continue
            if name in ("loss", "encoder"):
                console.warn(
                    f"the code of the {name} has changed since the run in {self.path} began; if it "
                    "computes something else now, name another folder with --workdir"
                )
                continue
            what = f"the {name} have changed since the run in {self.path} began"
            if name == "precision":
                what = f"the run in {self.path} computes in {began}, but this device in {now}"
            raise UserError(f"{what}; continue as it began, or name another folder with --workdir")

    @contextlib.contextmanager
    def claimed(
        self, provenance: Mapping[str, str], filled: ConfigDict | None = None
    ) -> Iterator[None]:
        """Locks the folder during the body, and writes the configuration, filled to fit images."""
        with claimed_or_refused(self.path):
            self._require_same_identity()
            self.require(provenance)
            begun = {
                "identity": identity(self._config),
                "provenance": dict(provenance),
                "all": for_files(filled or self._config),
                SPACE: describe_space(create_objective(filled or self._config).score_space),
            }
            with writing(self.path):
                write_json(self.path / files.CONFIG, begun)
                self._note_start()
            yield

    def _note_start(self) -> None:
        """Adds this start to run.json."""
        earlier = files.read_object(self.path / _STARTS)
        starts = earlier.pop("earlier_starts", []) if earlier else []
        starts += [earlier] if earlier else []
        now = machine.describe(self._config.seed)
        write_json(self.path / _STARTS, {**now, "earlier_starts": starts})

    def write_warnings(self, warnings: Sequence[str]) -> None:
        """Adds the warnings of this start to run.json; a failure is a warning, too."""
        path = self.path / _STARTS
        with console.tolerating(_STARTS):
            start = files.read_object(path) or {}
            write_json(path, {**start, "warnings": list(dict.fromkeys(warnings))})

    @property
    def total_steps(self) -> int | None:
        """Number of steps in the saved configuration; None if there is none."""
        return (self._saved or {"all": {}})["all"].get("train.total_steps")

    @property
    def results(self) -> dict[str, Any] | None:
        """Results of the run; None until it is finished."""
        return files.read_results(self.path / files.RESULTS)

    def write_results(self, results: dict[str, Any]) -> None:
        """Writes results.json, which marks the run as finished."""
        try:
            write_json(self.path / files.RESULTS, results)
        except OSError as error:
            raise UserError(
                f"the results above could not be written to {self.path} ({error.strerror}); "
                "fix that and repeat the command, which then only evaluates the model"
            ) from error

    @property
    def has_checkpoint(self) -> bool:
        """Whether the folder holds a checkpoint."""
        return any(path.name.isdigit() for path in (self.path / files.CHECKPOINTS).glob("*"))

    def checkpoints(self, *, read_only: bool = False) -> Checkpoints:
        """Opens the checkpoints in the folder."""
        return Checkpoints(self.path / files.CHECKPOINTS, read_only=read_only)


class SharedRun:
    """The folder of a run, perhaps in cloud storage; all processes call each method at once."""

    def __init__(self, workdir: str | pathlib.Path, config: ConfigDict) -> None:
        """Opens the folder, or the copy of a URL; nothing is written yet."""
        self._config = config
        self._cloud: CloudCopy | None = None
        path, self.location = processes.from_first(lambda: self._open(workdir))
        self.path = pathlib.Path(path)

    def _open(self, workdir: str | pathlib.Path) -> tuple[str, str]:
        self._cloud = open_url(workdir)
        folder = self._cloud.folder if self._cloud else pathlib.Path(workdir)
        self._folder = Workdir(folder, self._config)
        path = str(self._folder.path)
        return path, self._cloud.location if self._cloud else path

    @property
    def results(self) -> dict[str, Any] | None:
        """Results of the finished run; None while it is not finished."""
        return processes.from_first(lambda: self._folder.results)

    def require(self, provenance: Mapping[str, str]) -> None:
        """Refuses other provenance than the run's, see `Workdir.require`."""
        processes.from_first(lambda: self._folder.require(provenance))

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
    def claimed(self, provenance: Mapping[str, str], filled: ConfigDict) -> Iterator[Checkpoints]:
        """Claims the folder as `Workdir.claimed` does; yields the run's checkpoints."""
        with contextlib.ExitStack() as stack:

            def claim() -> None:
                stack.enter_context(self._folder.claimed(provenance, filled))
                if self._cloud:
                    stack.enter_context(self._cloud)

            processes.from_first(claim)
            checkpoints = Checkpoints(self.path / files.CHECKPOINTS)
            yield stack.enter_context(contextlib.closing(checkpoints))

    def require_last_state(self, checkpoints: Checkpoints, total: int) -> None:
        """Waits until the state after the last step is saved, or refuses to go on."""
        checkpoints.wait()
        steps, folder = checkpoints.steps, self.path / files.CHECKPOINTS / str(total)
        if not processes.from_first(lambda: total in steps and folder.is_dir()):
            saved = [step for step in steps if step < total]
            saved = f"from step {saved[-1]}" if saved else "from the beginning"
            raise UserError(
                f"the last state of this run could not be saved in {self.path}, so the run is not "
                f"finished; make room, and the same command resumes it {saved}"
            )

    def write_results(self, results: dict[str, Any], warnings: Sequence[str]) -> None:
        """Writes the warnings of this start, and the results, see `Workdir.write_results`."""

        def write() -> None:
            self._folder.write_warnings(warnings)
            self._folder.write_results(results)

        processes.from_first(write)
