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
from hypjax.errors import UserError, writing
from hypjax.geometry import SPACES, Space
from hypjax.objectives import OBJECTIVES, create_objective
from hypjax.objectives.create import SAVED_SPACE
from hypjax.objectives.own import BUILT_IN, is_known, stand_in
from hypjax.parallel import processes
from hypjax.retrieval.embeddings import describe_space, space_of
from hypjax.runs import files
from hypjax.runs.checkpoints import Checkpoints, SharedCheckpoints
from hypjax.runs.cloud_copy import open_url, reading
from hypjax.system import console, machine, watchdog
from hypjax.system.files import write_json
from hypjax.system.locks import claimed_or_refused

_PARTS = ("identity", "circumstances", "all")  # What config.json holds.
SPACE = "score_space"  # In config.json: that of the head.
# Fields that all objectives have.
_COMMON = (
    *("name", "space", "c", "learn_c", "c_bounds", "c_rate", "curvatures", "learn"),
    *("clip_radius", "feature_scale"),
)
_PROVENANCE = "run.json"
_LONGER = (
    ", where --config.model.weights={} --config.model.load_head=True starts from this run's model"
)


def saved_config(workdir: pathlib.Path) -> ConfigDict:
    """Reads the configuration of the run in a folder.

    Fields that were added since get their defaults. So do those of `config.run` in a published
    model: how it is executed is this machine's choice.
    """
    path = _config_path(workdir)
    saved = files.read_object(path)
    if saved is None:
        raise UserError(f"{workdir} holds no run (there is no {files.CONFIG})")
    fields = saved.get("all")
    if not isinstance(fields, dict):
        raise files.damaged(path, "it was not written by hypjax")
    if path.name == files.PUBLISHED:
        fields = {name: v for name, v in fields.items() if not name.startswith("run.")}
    fields.setdefault("model.architecture", "vit")  # Older runs lack the field.
    objective = fields.get("objective.name")
    if not is_known(objective):
        _stand_in(path, objective, fields)
    config = default_config(objective)
    for field in sorted(fields.keys() - flatten(config).keys()):
        raise UserError(f"{path} has the field {field}, which this version of hypjax does not know")
    fields = {name: _tuples(v) for name, v in fields.items()}
    for name, value in fields.items():
        if isinstance(value, dict):
            raise files.damaged(path, f"{name} is an object")
    try:
        with config.unlocked(), config.ignore_type():
            config.update_from_flattened_dict(fields)
    except OverflowError as error:
        raise files.damaged(path, str(error)) from error
    validate(config)
    if objective not in BUILT_IN and SPACE in saved:  # Its code may have changed, or be unknown.
        config[SAVED_SPACE] = _saved_space(path, saved[SPACE])
    if path.name == files.PUBLISHED:  # As many pixels as the default has at the default size.
        scale = default_config().data.image_size / config.data.image_size
        config.run.eval_batch_size = max(1, int(config.run.eval_batch_size * min(1, scale**2)))
    return config


def saved_architecture(workdir: pathlib.Path) -> object:
    """The `model.architecture` of the run in a folder, known or not; None if it has none."""
    fields = (files.read_object(_config_path(workdir)) or {}).get("all")
    return fields.get("model.architecture") if isinstance(fields, dict) else None


def _stand_in(path: pathlib.Path, name: object, fields: Mapping[str, Any]) -> None:
    """Registers what stands for an objective that only the run knows, with its fields."""
    own = {n.partition(".")[2]: _tuples(v) for n, v in fields.items() if n.startswith("objective.")}
    own = {field: value for field, value in own.items() if field not in _COMMON}
    parts = (part for v in own.values() for part in (v if isinstance(v, tuple) else (v,)))
    simple = all(map(str.isidentifier, own)) and all(
        isinstance(part, bool | int | float | str) for part in parts
    )
    if not isinstance(name, str) or SPACE not in (files.read_object(path) or {}) or not simple:
        raise UserError(f"{path} names the objective {name}, which this version does not know")
    stand_in(name, own)


def _saved_space(path: pathlib.Path, description: Any) -> Space:
    """The space in which a run scores its head."""
    try:
        for name in _space_names(description):
            if name not in SPACES:
                raise UserError(
                    f"{path} names the space {name}, which is not known in this process; register "
                    "it by hypjax.register_space"
                )
        return space_of(description)
    except UserError:
        raise
    except (KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise files.damaged(path, f"{SPACE} is no known space") from error


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
    circumstances = (files.read_object(_config_path(workdir)) or {}).get("circumstances")
    images = circumstances.get("images") if isinstance(circumstances, dict) else None
    return images if isinstance(images, str) else None


def read_warnings(workdir: pathlib.Path) -> list[str]:
    """Reads the warnings of all starts of a run, each once; none if they are not known."""
    with contextlib.suppress(UserError, AttributeError, TypeError):
        last = files.read_object(workdir / _PROVENANCE) or {}
        starts = [*last.get("earlier_starts", []), last]
        warnings = [text for start in starts for text in start.get("warnings", [])]
        return list(dict.fromkeys(text for text in warnings if isinstance(text, str)))
    return []


class Workdir:
    """The folder with everything that a run keeps."""

    def __init__(
        self, path: pathlib.Path, config: ConfigDict, compared: tuple[str, ...] = ("",)
    ) -> None:
        """Opens a folder, which need not exist; fields with these prefixes must be its run's."""
        self.path = path.absolute()
        self._config = config
        self._begun: dict[str, Any] = {}  # What config.json must hold.
        self._require_same_identity(compared)

    @property
    def _saved(self) -> dict[str, Any] | None:
        """What config.json holds; None if there is none."""
        path = _config_path(self.path)
        saved = files.read_object(path)
        if saved is not None and not all(isinstance(saved.get(part), dict) for part in _PARTS):
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
        # A field that was added since the run began has had its default.
        name = saved["identity"].get("objective.name")
        defaults = default_config(name) if name in list(OBJECTIVES) else self._config
        began = identity(defaults) | saved["identity"]
        now = identity(self._config)
        # What was chosen to fit the images is the run's, too.
        unset = [field for field in FITTED if began[field] is None and now[field] is not None]
        began |= {field: saved["all"].get(field) for field in unset}
        changes = differences(began, now)
        changes = [change for change in changes if change.startswith(compared)]
        if changes:
            longer = all(change.startswith("train.total_steps") for change in changes)
            longer &= str(began["train.total_steps"]).isdecimal()
            longer = longer and self._config.train.total_steps > int(began["train.total_steps"])
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

    def require(self, circumstances: Mapping[str, str]) -> None:
        """Refuses other images or precision than the run began with; warns of other code."""
        saved = (self._saved or {}).get("circumstances", {})
        changed = [name for name, now in circumstances.items() if now != saved.get(name)]
        if saved and "images" in changed:
            raise UserError(
                f"the images have changed since the run in {self.path} began (some were added, "
                "removed or edited); restore them, or name another folder with --workdir"
            )
        for name in ("loss", "encoder"):
            if saved and name in changed:
                console.warn(
                    f"the code of the {name} has changed since the run in {self.path} began; if it "
                    "computes something else now, name another folder with --workdir"
                )
        if saved and "precision" in changed:
            raise UserError(
                f"the run in {self.path} computes in {saved['precision']}, but this device in "
                f"{circumstances['precision']}; continue the run on a device of the same kind, or "
                "name another folder with --workdir"
            )

    @contextlib.contextmanager
    def claimed(
        self, circumstances: Mapping[str, str], filled: ConfigDict | None = None
    ) -> Iterator[None]:
        """Locks the folder during the body, and writes the configuration, filled to fit images."""
        with claimed_or_refused(self.path):
            self._require_same_identity()
            self.require(circumstances)
            self._begun = {
                "identity": identity(self._config),
                "circumstances": dict(circumstances),
                "all": for_files(filled or self._config),
                SPACE: describe_space(create_objective(filled or self._config).score_space),
            }
            with writing(self.path):
                self._write_start()
            yield

    def _write_start(self) -> None:
        write_json(self.path / files.CONFIG, self._begun)
        earlier = {}
        with contextlib.suppress(UserError):  # The run continues even if the file is damaged.
            earlier = files.read_object(self.path / _PROVENANCE) or {}
        before = earlier.pop("earlier_starts", [])
        starts = [*(before if isinstance(before, list) else []), *([earlier] if earlier else [])]
        now = machine.describe(self._config.seed)
        write_json(self.path / _PROVENANCE, {**now, "earlier_starts": starts})

    def write_warnings(self, warnings: Sequence[str]) -> None:
        """Adds the warnings of this start to run.json; a failure is a warning, too."""
        path = self.path / _PROVENANCE
        with contextlib.suppress(UserError), console.tolerating(_PROVENANCE):
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
            if not (self.path / files.CONFIG).exists():
                self._write_start()
                console.warn(
                    f"files of {self.path} were removed during the run; its configuration is "
                    "written again, but measurements may be lost"
                )
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
        self._first, self._config = processes.is_first(), config
        self._cloud = open_url(workdir) if self._first else None
        folder = self._cloud.folder if self._cloud else pathlib.Path(workdir)
        self._folder = Workdir(folder, config, compared=("",) if self._first else ())
        self.path = self._folder.path
        self.location = self._cloud.location if self._cloud else str(self.path)

    @property
    def results(self) -> dict[str, Any] | None:
        """Results of the finished run; None while it is not finished."""
        return processes.from_first(lambda: self._folder.results)

    def require(self, circumstances: Mapping[str, str]) -> None:
        """Refuses other circumstances than the run's, see `Workdir.require`."""
        processes.from_first(lambda: self._folder.require(circumstances))

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
        """Claims the folder as `Workdir.claimed` does; yields the run's checkpoints."""
        lock = self._folder.claimed(circumstances, filled) if self._first else None
        with (
            lock or contextlib.nullcontext(),
            self._cloud or contextlib.nullcontext(),
            contextlib.closing(SharedCheckpoints(self._folder.checkpoints)) as checkpoints,
            watchdog.protected_cleanup(),
        ):
            yield checkpoints

    def require_last_state(self, checkpoints: SharedCheckpoints, total: int) -> None:
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
        if self._first:
            self._folder.write_warnings(warnings)
        processes.from_first(lambda: self._folder.write_results(results))
