"""A run's folder: its configuration, its lock and its results."""

import contextlib
import itertools
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from hypjax.config import (
    FITTED,
    Config,
    config_of,
    default_config,
    differences,
    flatten,
    for_files,
    identity,
    override,
    validate,
    with_smaller_batches,
)
from hypjax.data.folders import is_image_name
from hypjax.errors import UserError, writing
from hypjax.geometry import Space
from hypjax.geometry.registry import describe_space, space_of
from hypjax.parallel import processes
from hypjax.runs import files
from hypjax.runs.checkpoints import Checkpoints
from hypjax.runs.cloud_copy import CloudCopy
from hypjax.system import console, machine
from hypjax.system.cloud import is_url
from hypjax.system.files import absolute, locked, missing, write_json
from hypjax.types import CAPTIONS, TEXT_ENCODER

# Space in which evaluation compares head outputs: in a published model's hypjax.json, with learned
# scalars; in config.json, which is written before training, with the scalars' initial values.
SPACE, FIRST_SPACE = "score_space", "score_space_before_training"
_LISTED = 10_000  # Files of a new run's folder among which images are sought.
_COPY = ".config.json"  # Of config.json, without which the checkpoints are of no use.
# Fields that say where a run's images happen to be. What they are, their fingerprint says.
LOCATIONS = ("data.path", "data.labels", "data.captions")


def saved_config(workdir: pathlib.Path, overrides: Sequence[str] = ()) -> Config:
    """Reads and validates a run's configuration; overrides may say where its images are now."""
    config = override(read_saved_config(workdir), overrides)
    validate(config)
    if overrides:
        require_identity(workdir, flatten(config))
    return config


def read_saved_config(workdir: pathlib.Path) -> Config:
    """Reads a run's configuration, unvalidated; published models get the default `config.run`."""
    if not (fields := saved_fields(workdir)):
        problem = f"{workdir} holds no run (there is no {files.CONFIG})"
        problem = problem if workdir.exists() else missing(workdir)
        raise UserError(f"{problem}; train first, or name a run's folder")
    if published := files.is_published(workdir):
        fields = {name: value for name, value in fields.items() if not name.startswith("run.")}
    with files.damage_explained(_config_path(workdir)):
        config = config_of(fields)
    return with_smaller_batches(config) if published else config


def saved_space(workdir: pathlib.Path) -> Space:
    """Reads the space in which evaluation compares a run's head outputs, see `SPACE`."""
    saved = _read_run(workdir)
    with files.damage_explained(_config_path(workdir)):
        try:
            return space_of(saved.get(SPACE) or saved[FIRST_SPACE])
        except KeyError as error:
            problem = f"the run's space {error.args[0]} is unknown here"
            raise UserError(f"{problem}; call hypjax.register_space first") from error


def saved_fields(workdir: pathlib.Path) -> dict[str, Any]:
    """Fields of a saved configuration, as JSON values by dotted name; {} without a run."""
    return _read_run(workdir).get("all", {})


def saved_fingerprint(workdir: pathlib.Path) -> str | None:
    """Fingerprint of a run's images; None if it was not saved."""
    return _read_run(workdir).get("provenance", {}).get("images")


def saved_text_encoder(workdir: pathlib.Path) -> str | None:
    """Hash of a run's encoder of texts; None if it was not saved."""
    return _read_run(workdir).get("provenance", {}).get(TEXT_ENCODER)


def read_if_intact(path: pathlib.Path, instead: str = "it is left out") -> dict[str, Any]:
    """Reads an object from a file; {} if it is missing, or damaged, with a warning."""
    try:
        return files.read_object(path) or {}
    except UserError as error:
        console.warn_once(f"{str(error).partition(';')[0]}; {instead}")
        return {}


def has_checkpoint(workdir: pathlib.Path) -> bool:
    """Whether a folder holds a checkpoint."""
    return any(path.name.isdigit() for path in (workdir / files.CHECKPOINTS).glob("*"))


def require_identity(
    workdir: pathlib.Path,
    fields: Mapping[str, Any],
    prefixes: tuple[str, ...] = ("",),
    *,
    grow: bool = False,
) -> None:
    """Rejects a folder whose run differs in `fields`, by dotted name, that start with a prefix.

    `LOCATIONS` may differ; with `grow`, a run with a checkpoint may have had fewer steps.
    """
    saved = saved_fields(workdir)
    if not saved:
        if has_checkpoint(workdir) or (workdir / files.RESULTS).exists():
            problem = f"{workdir} holds a run without its {files.CONFIG}"
            raise UserError(f"{problem}; restore it, or train in another folder (--workdir)")
        return
    # A field that was added since the run began had its default.
    defaults = identity(flatten(default_config(fields["objective.name"])))
    current, saved = identity(fields), defaults | saved
    saved = {field: value for field, value in saved.items() if not field.startswith("run.")}
    same = {field for field in FITTED if current[field] is None} | {*LOCATIONS}
    if grow and has_checkpoint(workdir) and _added_steps(saved, fields):
        same |= {"train.total_steps", "train.patience"}
    current |= {field: saved.get(field) for field in same}
    changes = [change for change in differences(saved, current) if change.startswith(prefixes)]
    if not changes:
        return
    advice = "use the same settings, or train in another folder (hypjax.main --workdir)"
    if all(change.startswith("train.total_steps") for change in changes):
        start = f"--config.model.weights={workdir} --config.model.load_head=True"
        advice += f", where {start} starts from this run's model"
    problem = f"{workdir} holds a run with another configuration ({'; '.join(changes)})"
    raise UserError(f"{problem}; {advice}")


def _added_steps(saved: Mapping[str, Any], fields: Mapping[str, Any]) -> int:
    """How many more steps a run is configured for than when it was saved."""
    steps = fields["train.total_steps"] or 0
    return max(steps - (saved.get("train.total_steps") or steps), 0)


def require_provenance(workdir: pathlib.Path, provenance: Mapping[str, str]) -> None:
    """Rejects changes of images or precision since a run began; warns if custom code changed."""
    saved = _read_run(workdir).get("provenance")
    if not saved:
        return
    remedy = "name another folder with --workdir"
    same_content = bool(saved.get("content")) and saved["content"] == provenance.get("content")
    compared = provenance.keys() - ({"images", "content"} if same_content else {"content"})
    compared -= {CAPTIONS, TEXT_ENCODER} - saved.keys()  # Which runs formerly lacked.
    for name in [x for x in provenance if x in compared and provenance[x] != saved.get(x)]:
        if name in ("loss", "encoder"):
            problem = f"the code of the {name} has changed since the run in {workdir} began"
            console.warn(f"{problem}; if results change with it, {remedy}")
            continue
        problem = f"the {name} have changed since the run in {workdir} began"
        if name == TEXT_ENCODER:
            changed = "the encoder of texts, or its tokenizer, has changed"
            problem = f"{changed} since the run in {workdir} began"
        if name == "precision":
            change = f"{saved.get(name)}, but this device {provenance[name]}"
            problem = f"the run in {workdir} uses {change}"
        raise UserError(f"{problem}; continue as it began, or {remedy}")


def _config_path(workdir: pathlib.Path) -> pathlib.Path:
    return workdir / (files.PUBLISHED if files.is_published(workdir) else files.CONFIG)


def _read_run(workdir: pathlib.Path) -> dict[str, Any]:
    """Reads a run's config.json or a published model's hypjax.json; {} if there is no file."""
    path, copy = _config_path(workdir), workdir / _COPY
    saved = None
    if path.exists() and copy.exists():
        saved = read_if_intact(path, f"its copy {copy} is used") or files.read_object(copy)
    if saved is None and (saved := files.read_object(path)) is None:
        return {}
    with files.damage_explained(path):
        if not isinstance(saved.get("all"), dict):
            raise ValueError("it was not written by hypjax")
    return saved


class Workdir:
    """Folder of a run in training: `path`, and `location`, which is a URL if the run is copied.

    All processes call the methods together; only the first process reads and writes files.
    """

    def __init__(self, workdir: str | pathlib.Path, fields: Mapping[str, Any]) -> None:
        """Opens the folder of a run with these fields, by dotted name; it may not exist yet.

        Raises a `UserError` if it has another run.
        """
        self._fields = fields
        self._cloud: CloudCopy | None = None
        path, self.location, self._saved = processes.from_first(lambda: self._open(workdir))
        self.path = pathlib.Path(path)
        current, saved = identity(fields), self._saved
        self._added_steps = _added_steps(saved, fields)
        self.has_moved = any(saved and saved.get(x) != current[x] for x in LOCATIONS)

    def _open(self, workdir: str | pathlib.Path) -> tuple[str, str, dict[str, Any]]:
        folder = absolute(pathlib.Path(workdir))
        location = str(folder)
        if is_url(workdir):
            self._cloud = CloudCopy(str(workdir))
            folder, location = self._cloud.folder, self._cloud.location
        require_identity(folder, self._fields, grow=True)
        saved = saved_fields(folder)
        names = itertools.chain(folder.glob("*"), folder.glob("*/*")) if not saved else ()
        if image := next(filter(is_image_name, itertools.islice(names, _LISTED)), None):
            raise UserError(f"{folder} holds images, such as {image}; name another --workdir")
        return str(folder), location, saved

    @property
    def name(self) -> str:
        """The folder's name, for reports."""
        return pathlib.Path(self.location).name

    @property
    def results(self) -> dict[str, Any] | None:
        """The run's results; None until it is finished with all steps of the configuration."""
        results = processes.from_first(lambda: files.read_object(self.path / files.RESULTS))
        return None if self._added_steps else results

    @property
    def fitted(self) -> dict[str, Any]:
        """Values that the run fitted to its images, of fields that are open here."""
        return {x: self._saved[x] for x in FITTED if self._fields[x] is None and x in self._saved}

    @contextlib.contextmanager
    def locked(
        self,
        provenance: Mapping[str, str],
        fitted: Mapping[str, Any] | None = None,
        space: Space | None = None,
        mesh: Mesh | None = None,
    ) -> Iterator[Checkpoints]:
        """Locks the folder, writes its config.json, and yields its checkpoints.

        `fitted` are the fields with those fitted to the images. `space` is the objective's
        `score_space`, which evaluation needs if a custom loss is absent; `mesh` see `Checkpoints`.
        """
        fields = {
            "provenance": dict(provenance),
            "all": for_files(fitted or self._fields),
            FIRST_SPACE: None if space is None else describe_space(space),
        }
        with contextlib.ExitStack() as stack:

            def lock_and_begin() -> None:
                stack.enter_context(locked(self.path))
                # Another process may have started the run before the lock.
                require_identity(self.path, self._fields, grow=True)
                require_provenance(self.path, provenance)
                with writing(self.path):
                    if self._added_steps:
                        self._grow()
                    if not (self.path / files.RESULTS).exists():
                        self._write_start()
                    write_json(self.path / _COPY, fields)
                    write_json(self.path / files.CONFIG, fields)
                if self._cloud:
                    stack.enter_context(self._cloud)

            processes.from_first(lock_and_begin)
            checkpoints = Checkpoints(self.path / files.CHECKPOINTS, mesh=mesh)
            yield stack.enter_context(contextlib.closing(checkpoints))

    def _grow(self) -> None:
        """Sets the results of fewer steps aside, and says what the further steps lead to."""
        fields, results = self._fields, files.read_object(self.path / files.RESULTS)
        total, patience = fields["train.total_steps"], fields["train.patience"]
        before = (results or {}).get("last_step", total - self._added_steps)
        if results:
            if "last_step" in results and self._saved.get("train.patience") == patience:
                problem = f"train.patience={patience} ended this run at step {before}"
                raise UserError(f"{problem}; for more steps, set another patience, too")
            (self.path / files.RESULTS).rename(self.path / f"results-{before}.json")
        outcome = f"its last model is that of a run of {total} steps"
        if fields["optim.warmup_steps"] is None:
            outcome += f" with the warm-up of {before}"
        if fields["optim.schedule"] == "cosine":
            outcome = f"its rate jumps to the cosine of {total} steps, so no single run equals it"
        console.say(f"the run of {before} steps goes on to step {total}; {outcome}")

    def _write_start(self) -> None:
        last_start = read_if_intact(self.path / files.STARTS)
        start = machine.describe(self._fields["seed"])
        start["earlier_starts"] = last_start.pop("earlier_starts", [])
        if last_start:
            start["earlier_starts"].append(last_start)
        write_json(self.path / files.STARTS, start)

    def require_last_state(self, checkpoints: Checkpoints, last_step: int) -> None:
        """Waits for the checkpoint of the last step; raises a `UserError` if it is not saved."""
        checkpoints.wait()

        def is_saved() -> bool:
            # A run with results is not continued, so its last state must survive a power failure.
            if hasattr(os, "sync"):  # Not on Windows.
                os.sync()
            return (self.path / files.CHECKPOINTS / str(last_step)).is_dir()

        if not processes.from_first(is_saved):
            problem = f"the last state could not be saved in {self.path}"
            raise UserError(f"{problem}; free disk space, and run the same command again")

    def write_results(
        self, results: dict[str, Any], warnings: Sequence[str] = (), engines: Sequence[str] = ()
    ) -> None:
        """Writes this start's warnings and engines, and results.json, which marks the run's end."""

        def write() -> None:
            with console.tolerating(files.STARTS):
                start = read_if_intact(self.path / files.STARTS)
                start |= {"warnings": list(dict.fromkeys(warnings)), "engines": list(engines)}
                write_json(self.path / files.STARTS, start)
            with writing(self.path):
                write_json(self.path / files.RESULTS, results)

        processes.from_first(write)
