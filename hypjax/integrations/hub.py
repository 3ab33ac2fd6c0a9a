"""Publishes trained models on the Hugging Face hub, in folders that hypjax and timm load."""

import dataclasses
import os
import pathlib
import re
import shutil
from collections.abc import Mapping
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from hypjax import __version__
from hypjax.assemble import saved_method
from hypjax.config import default_config, flatten, identity
from hypjax.config.choices import is_captioned
from hypjax.errors import UserError, at_the_call
from hypjax.experiment.trained import TrainedModel, restore_best
from hypjax.inference.save import describe, replacing_model, write_model
from hypjax.models.architectures import ARCHITECTURES, is_in_timm
from hypjax.models.custom import CustomEncoder
from hypjax.models.encoder import FEATURES
from hypjax.models.pretrained import pools_as_timm
from hypjax.models.weight_files import repository, timm_weights
from hypjax.runs import files
from hypjax.runs.cloud_copy import reading
from hypjax.runs.tables import beside_published, format_results
from hypjax.runs.workdir import saved_fingerprint, saved_text_encoder
from hypjax.system import console, hub
from hypjax.system.files import write_text
from hypjax.types import TEXT_ENCODER

_TEMPLATE = pathlib.Path(__file__).with_name("model_card.md.j2")
_TASK = "image-feature-extraction"
_HEADS = {"norm_dense": "a Dense layer after a LayerNorm", "linear": "a Dense layer without bias"}


@at_the_call
def push(
    workdir: str | os.PathLike[str],
    name: str,
    *,
    folder: str | os.PathLike[str] | None = None,
    private: bool = False,
) -> pathlib.Path:
    """Publishes a run's best model or, without validation, its last, on the Hugging Face hub.

    Writes and returns a folder with the weights under timm's names, the head as classifier,
    configurations for hypjax and for timm, results and a model card. Of paths in the configuration,
    only the last names are published; `config.run` is left out. One commit uploads all files, and
    removes those of an earlier model. Without a token or a connection, a message says why the
    folder was not uploaded.

    Args:
        workdir: Folder of a run, or its URL.
        name: Name of the repository, 'OWNER/NAME'.
        folder: Folder to write, by default hub/NAME. Replaces an earlier model in the folder, but
            refuses a folder that holds anything else.
        private: Whether to make a new repository private.
    """
    if not hub.is_name(name):
        raise UserError(f"{name!r} does not name a repository; write OWNER/NAME")
    folder = pathlib.Path(folder or pathlib.Path("hub", name.rpartition("/")[2])).expanduser()
    with replacing_model(folder) as staged, reading(os.fspath(workdir)) as run:
        trained = restore_best(run, saved_method(run))
        base_model = _base_model(trained.method.start.weights or "")
        method = dataclasses.replace(trained.method, fields=_without_paths(trained.method.fields))
        trained = dataclasses.replace(trained, method=method)
        results = files.read_object(run / files.RESULTS) or {}
        if (run / files.PROJECTIONS).exists():
            shutil.copytree(run / files.PROJECTIONS, staged / files.PROJECTIONS)
        if results:
            shutil.copyfile(run / files.RESULTS, staged / files.RESULTS)
        for file in (run / name for name in files.TOKENS):
            if file.is_file():
                shutil.copyfile(file, staged / file.name)
        write_text(staged / "README.md", _model_card(name, trained, results, base_model))
        encoder = saved_text_encoder(run)
        texts = {} if encoder is None else {TEXT_ENCODER: encoder}
        write_model(staged, trained, {"images": saved_fingerprint(run), **texts})
    paths = [x.relative_to(folder).as_posix() for x in sorted(folder.rglob("*")) if x.is_file()]
    try:
        address = hub.upload(folder, paths, name, private=private, owned=files.MODEL_FILES)
        console.say(f"published {address}")
    except UserError as error:
        console.say(f"wrote {folder}, but did not upload it: {error}")
    return folder


def _without_paths(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Reduces paths and URLs in a configuration to their last names, except names on the hub."""

    def is_location(field: str, value: Any) -> bool:
        if field in ("model.architecture", "objective.name") or not isinstance(value, str):
            return False  # Names of code may hold a colon.
        return bool(value) and not (field == "model.weights" and repository(value))

    shown = {x: _last_name(y) if is_location(x, y) else y for x, y in fields.items()}
    if encoder := fields["model.text.encoder"]:
        library, _, name = encoder.partition(":")
        is_on_hub = library == "st" and hub.is_name(name) and not pathlib.Path(name).exists()
        shown["model.text.encoder"] = f"{library}:{name if is_on_hub else _last_name(name)}"
    return shown


def _last_name(location: str) -> str:
    """Last part of a path of any system, or of a URL's path; 'unnamed' if it has none."""
    scheme, _, path = location.rpartition("://")
    if scheme:
        path = re.split(r"[?#]", path)[0].partition("/")[2]
    names = [name for name in re.split(r"[/\\:]", path) if name.strip(". ")]
    return names[-1] if names and not names[-1].startswith("~") else "unnamed"


def _model_card(
    name: str, trained: TrainedModel, results: Mapping[str, Any], base_model: str | None
) -> str:
    method, model = trained.method, trained.model
    is_custom = isinstance(model.encoder, CustomEncoder)
    is_of_timm = not is_custom and is_in_timm(model.encoder)
    defaults = identity(flatten(default_config(method.fields["objective.name"])))
    states = {state: results[state] for state in ("untrained", "final", "best") if state in results}
    tables = filter(None, [format_results(states), beside_published(results, method.fields)])
    metadata = ModelCardData(
        library_name="hypjax",
        pipeline_tag=_TASK,
        tags=["image-retrieval", "metric-learning", *(["timm"] if is_of_timm else [])],
        model_name=name,
        base_model=base_model,
        eval_results=_scores(method.fields["data.name"], results),
    )
    card = ModelCard.from_template(
        metadata,
        str(_TEMPLATE),
        name=name,
        description=describe(method),
        space=method.trained_objective(trained.params).score_space,
        is_custom=is_custom,
        takes_pixels=model.encoder.takes_pixels,
        text_encoder=method.fields["model.text.encoder"],
        has_text_tower=bool(model.towers) and method.fields["model.text.kind"] != FEATURES,
        is_released=bool(model.towers) and not is_captioned(method.fields["objective.name"]),
        is_of_timm=is_of_timm,
        lacking_head=_HEADS.get(model.head_kind),
        lacking_pooling=model.encoder.pooling
        if is_of_timm and not pools_as_timm(model.encoder)
        else "",
        dataset=method.fields["data.name"],
        notes=results.get("notes", ()),
        version=__version__,
        fields={
            k: value for k, value in identity(method.fields).items() if value != defaults.get(k)
        },
        tables="\n".join(tables) if results else "",
        is_finished=bool(results),
    )
    return str(card)


def _base_model(weights: str) -> str | None:
    """The repository of pretrained weights, if the hub holds them."""
    is_of_timm = timm_weights(weights).split(".")[0] in ARCHITECTURES
    is_on_hub = is_of_timm or weights.startswith((hub.SCHEME, "hf-hub:"))
    return repository(weights) if is_on_hub else None  # Other names may be folders.


def _scores(dataset: str, results: Mapping[str, Any]) -> list[EvalResult] | None:
    """Scores of the head in the card's metadata."""
    # Scores with notes are not comparable, so only the card's text shows them.
    state = {} if "notes" in results else results.get("best", results.get("final", {}))
    scores = [
        EvalResult(
            task_type=_TASK,
            task_name="Image retrieval",
            dataset_type=dataset,
            dataset_name=f"{dataset}, test images",
            metric_type=metric,
            metric_value=round(value, 4),
        )
        for metric, value in state.get("head", {}).items()
    ]
    return scores or None
