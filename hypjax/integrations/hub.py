"""Models to publish: a folder that hypjax and timm load, and that the Hugging Face hub holds."""

import os
import pathlib
import re
import shutil
from collections.abc import Mapping
from typing import Any

from huggingface_hub import EvalResult, ModelCardData
from ml_collections import ConfigDict

from hypjax import __version__
from hypjax.config import default_config, flatten, identity
from hypjax.errors import UserError, at_the_call
from hypjax.inference.run import Run
from hypjax.inference.save import describe, replacing_model, write_model
from hypjax.inference.weights import TrainedModel
from hypjax.models.architectures import ARCHITECTURES
from hypjax.models.custom import CustomEncoder
from hypjax.models.pretrained import pools_as_timm
from hypjax.models.weight_files import repository, timm_weights
from hypjax.runs import files
from hypjax.runs.cloud_copy import reading
from hypjax.runs.published import compare
from hypjax.runs.tables import format_results
from hypjax.runs.workdir import saved_fingerprint
from hypjax.system import console, hub
from hypjax.system.files import write_text

_CARD = """\
---
{metadata}
---

# {name}

Embeddings for image retrieval: {description}.

## Use

In hypjax, which scales the pixels and maps the embeddings into their space:

```python
import hypjax

model = hypjax.load("{name}")
points = model.embed(["one.jpg", "two.jpg"])  # Points of {space}
hits = model.search("photos/", "query.jpg", k=10)
print(hits[0])
```

{elsewhere}Test images are {view}.
Their pixels, from 0 to 1, have the mean {mean} and the standard deviation {std}.

## Data

{data}

## Recipe

Trained by hypjax {version}. These fields differ from its defaults; `hypjax.json` has all of them.

| field | value |
|---|---|
{fields}

## Results

{results}
"""
_IN_TIMM = """\
In timm, whose output is what hypjax maps into that space:

```python
import timm

model = timm.create_model("hf-hub:{name}", pretrained=True).eval()
```

"""
_OWN = "The encoder is no part of hypjax: pass its Flax module to `load` as `encoder=`.\n\n"


@at_the_call
def push(
    workdir: str | os.PathLike[str],
    name: str,
    *,
    folder: str | os.PathLike[str] | None = None,
    private: bool = False,
) -> pathlib.Path:
    """Publishes a run's best model or, without validation, its last, on the Hugging Face hub.

    Weights are written under timm's names, with the head as classifier, beside the configuration
    for hypjax and one for timm, results and a model card. Paths in the configuration lose all but
    their last name, and `config.run` is left out. One commit uploads all files and removes an
    earlier model's. Without a token or a connection, the folder remains, and a message says why.

    Args:
        workdir: Folder of a run, or its URL.
        name: Name of the repository, 'OWNER/NAME'.
        folder: Folder to write, by default hub/NAME, and to return. An earlier model in it is
            replaced; a folder that holds anything else is refused.
        private: Whether a repository that is created is private.
    """
    if not hub.is_name(name):
        raise UserError(f"{name!r} is no name of a repository; write OWNER/NAME")
    folder = pathlib.Path(folder or pathlib.Path("hub", name.rpartition("/")[2])).expanduser()
    with replacing_model(folder) as staged, reading(workdir) as run:
        trained = Run.saved(run).restore_best(run)
        base_model = _base_model(trained.config)
        _remove_paths(trained.config)
        results = files.read_results(run / files.RESULTS) or {}
        trained.copy_projections(run, staged)
        for file in (files.RESULTS, files.MATCHES):
            if (run / file).exists():
                shutil.copyfile(run / file, staged / file)
        write_text(staged / "README.md", _model_card(name, trained, results, base_model))
        write_model(staged, trained, {"images": saved_fingerprint(run)})
    paths = [x.relative_to(folder).as_posix() for x in sorted(folder.rglob("*")) if x.is_file()]
    owned = lambda file: files.is_hashed(file) or file == files.CONFIG  # noqa: E731
    try:
        address = hub.upload(folder, paths, name, private=private, owned=owned)
        console.say(f"published {address}")
    except UserError as error:
        console.say(f"wrote {folder}, but did not upload it: {error}")
    return folder


def _remove_paths(config: ConfigDict) -> None:
    """Leaves the last name of each path and URL in a configuration, but names on the hub."""
    for field, value in flatten(config).items():
        if field in ("model.architecture", "objective.name"):
            continue  # Names of code may hold a colon.
        if isinstance(value, str) and not (field == "model.weights" and repository(value)):
            config.update_from_flattened_dict({field: _last_name(value)})


def _last_name(location: str) -> str:
    """Last name of any system's path, or of a URL below its host or bucket; 'unnamed' if none."""
    scheme, _, rest = location.rpartition("://")
    rest = re.split(r"[?#]", rest)[0].partition("/")[2] if scheme else rest
    names = [name for name in re.split(r"[/\\:]", rest) if name.strip(". ")]
    return names[-1] if names and names[-1][0] != "~" else "unnamed" if location else ""


def _model_card(
    name: str, trained: TrainedModel, results: Mapping[str, Any], base_model: str | None
) -> str:
    config, model = trained.config, trained.model
    data, custom = config.data, isinstance(model.encoder, CustomEncoder)
    square = f"{data.image_size} × {data.image_size}"
    view = f"resized to {square} pixels, whatever their shape"
    if data.test_view == "centre_crop":
        view = f"resized to a shorter side of {data.resize} pixels, and cut to the central {square}"
    notes = [f"Note: {note}." for note in results.get("notes", ())]
    defaults = identity(default_config(config.objective.name))
    changed = {f: value for f, value in identity(config).items() if value != defaults.get(f)}
    tags = ["image-retrieval", "metric-learning", *["timm"] * (not custom)]
    elsewhere = _OWN if custom else _IN_TIMM.format(name=name)
    if model.head_kind == "norm_dense" and not custom:
        elsewhere += "timm's model lacks the head, a Dense layer after a LayerNorm.\n\n"
    if not (custom or pools_as_timm(model.encoder)):
        elsewhere += f"timm's model lacks the pooling of tokens, `{model.encoder.pooling}`.\n\n"
    scores = "The run is not finished."
    if results:
        states = {x: results[x] for x in ("untrained", "final", "best") if x in results}
        tables = [format_results(states), compare(results, config)]
        scores = "\n".join(["```", *filter(None, tables), "```"])
    return _CARD.format(
        name=name,
        description=describe(config),
        space=trained.objective.score_space,
        metadata=_metadata(config, results, tags=tags, model_name=name, base_model=base_model),
        elsewhere=elsewhere,
        view=view,
        mean=list(data.mean),
        std=list(data.std),
        data="\n".join([f"`{data.name}`, in hypjax's split.", *notes]),
        version=__version__,
        fields="\n".join(f"| `{field}` | `{value}` |" for field, value in changed.items()),
        results=scores,
    )


def _base_model(config: ConfigDict) -> str | None:
    weights = config.model.weights or ""
    prefixed = weights.startswith((hub.SCHEME, "hf-hub:"))
    known = timm_weights(weights).split(".")[0] in ARCHITECTURES  # Or it is a folder's name.
    return repository(weights) if prefixed or known else None


def _metadata(config: ConfigDict, results: Mapping[str, Any], **facts: Any) -> str:
    """The card's metadata, in YAML, which the hub reads: tags, base model and scores."""
    # Scores with notes are not comparable, so only the card's text has them.
    state = {} if "notes" in results else results.get("best", results.get("final", {}))
    kind = {"library_name": "hypjax", "pipeline_tag": "image-feature-extraction"}
    scores = [
        EvalResult(
            task_type=kind["pipeline_tag"],
            task_name="Image retrieval",
            dataset_type=config.data.name,
            dataset_name=f"{config.data.name}, test images",
            metric_type=metric,
            metric_value=round(value, 4),
        )
        for metric, value in state.get("head", {}).items()
    ]
    return ModelCardData(**kind, **facts, eval_results=scores or None).to_yaml()
