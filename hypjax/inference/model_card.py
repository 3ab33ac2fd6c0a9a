"""The card of a published model: what it is, how to load it, its data, recipe and results."""

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from hypjax import __version__
from hypjax.config import default_config, identity
from hypjax.config.choices import GIVEN, OWN
from hypjax.geometry import Space
from hypjax.models import Embedder
from hypjax.models.architectures import ARCHITECTURES
from hypjax.models.encoder import FEATURES
from hypjax.models.own import OwnEncoder
from hypjax.models.pretrained import pools_as_timm
from hypjax.models.weight_files import is_hub_name, repository_of, timm_weights
from hypjax.runs.published import compare
from hypjax.runs.tables import format_results
from hypjax.system import hub

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
_OWN = """\
The encoder is no part of hypjax: pass its Flax module to `load` as `encoder=`.

"""


def model_card(
    name: str,
    config: ConfigDict,
    model: Embedder,
    space: Space,
    results: Mapping[str, Any] | None,
    began: str | None,
) -> str:
    """The card of a run's model, a README.md; results are None if the run is not finished.

    `began` is the repository of the weights that training began with, see `base_model`.
    """
    data = config.data
    square = f"{data.image_size} × {data.image_size}"
    view = f"resized to {square} pixels, whatever their shape"
    if data.test_view == "centre_crop":
        view = f"resized to a shorter side of {data.resize} pixels, and cut to the central {square}"
    notes = [f"Note: {note}." for note in (results or {}).get("notes", ())]
    defaults = identity(default_config(config.objective.name))
    changed = {f: value for f, value in identity(config).items() if value != defaults.get(f)}
    own = isinstance(model.encoder, OwnEncoder)
    return _CARD.format(
        name=name,
        description=describe(config),
        space=space,
        metadata=_metadata(name, config, results, began, in_timm=not own),
        elsewhere=_OWN if own else _IN_TIMM.format(name=name) + _unlike_timm(model),
        view=view,
        mean=list(data.mean),
        std=list(data.std),
        data="\n".join([f"`{data.name}`, in hypjax's split.", *notes]),
        version=__version__,
        fields="\n".join(f"| `{field}` | `{value}` |" for field, value in changed.items()),
        results=_results(config, results),
    )


def base_model(config: ConfigDict) -> str | None:
    """The repository on the hub of the weights that training began with, if there is one."""
    weights = config.model.weights
    if not weights or not is_hub_name(weights):
        return None
    prefixed = weights.startswith((hub.SCHEME, "hf-hub:"))
    known = timm_weights(weights).split(".")[0] in ARCHITECTURES  # Or it is a folder's name.
    return repository_of(weights) if prefixed or known else None


def _metadata(
    name: str,
    config: ConfigDict,
    results: Mapping[str, Any] | None,
    began: str | None,
    *,
    in_timm: bool,
) -> str:
    """What the hub reads of a model, in YAML: by what it was trained, and its scores.

    Scores with notes, which cannot be compared with others, stand in the text alone.
    """
    from huggingface_hub import EvalResult, ModelCardData

    results = {} if results is None or "notes" in results else results
    state = results.get("best", results.get("final", {}))
    scores = [
        EvalResult(
            task_type="image-feature-extraction",
            task_name="Image retrieval",
            dataset_type=config.data.name,
            dataset_name=f"{config.data.name}, test images",
            metric_type=metric,
            metric_value=round(value, 4),
        )
        for metric, value in state.get("head", {}).items()
    ]
    data = ModelCardData(
        library_name="hypjax",
        pipeline_tag="image-feature-extraction",
        tags=["image-retrieval", "metric-learning", *(["timm"] if in_timm else [])],
        base_model=began,
        model_name=name,
        eval_results=scores or None,
    )
    return data.to_yaml()


def describe(config: ConfigDict) -> str:
    """Says in one line what a run's model is: encoder, head, dataset and loss."""
    model, data = config.model, config.data
    encoder, loss = (name.removeprefix(OWN) for name in (model.architecture, config.objective.name))
    head = f"a head of {model.head_dim} coordinates"
    images = "images given from Python" if data.name == GIVEN else data.name
    if encoder == FEATURES:
        return f"features of {model.width} coordinates with {head}, trained by {loss}"
    if encoder == "vit":
        encoder = f"ViT ({model.depth} blocks of width {model.width})"
    return (
        f"{encoder} with {'no head' if model.head == 'none' else head}, for {data.image_size} × "
        f"{data.image_size} pixels, trained on {images} with {loss}"
    )


def _unlike_timm(model: Embedder) -> str:
    """What timm's model lacks of this one, as a paragraph."""
    text = ""
    if model.head_kind == "norm_dense":
        text += "timm's model lacks the head, a Dense layer after a LayerNorm. "
    if not pools_as_timm(model.encoder):
        text += (
            f"This model pools tokens by `{model.encoder.pooling}`, which timm's lacks: pool "
            "those of `model.forward_features(images)`, then apply the classifier. "
        )
    return text and f"{text}\n\n"


def _results(config: ConfigDict, results: Mapping[str, Any] | None) -> str:
    if results is None:
        return "The run is not finished."
    states = {state: results[state] for state in ("untrained", "final", "best") if state in results}
    shown = [format_results(states), compare(results, config)]
    return "\n".join(["```", *filter(None, shown), "```"])
