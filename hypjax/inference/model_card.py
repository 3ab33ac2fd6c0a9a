"""The model card of a published model: README.md of its repository on the Hugging Face hub."""

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from hypjax import __version__
from hypjax.config import default_config, identity
from hypjax.objectives import create_objective
from hypjax.runs.published import compare
from hypjax.runs.tables import format_results

_STATES = ("untrained", "final", "best")
_CARD = """\
---
library_name: hypjax
pipeline_tag: image-feature-extraction
tags:
- image-retrieval
- metric-learning
- timm
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

In timm, whose output is what hypjax maps into that space:

```python
import timm

model = timm.create_model("hf-hub:{name}", pretrained=True).eval()
```

{pooling}Test images are {view}.
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


def model_card(
    name: str,
    config: ConfigDict,
    results: Mapping[str, Any] | None,
    pools_as_timm: bool,
    head_in_timm: bool,
) -> str:
    """Writes the card of a run's model; results are None if the run is not finished.

    The flags say whether timm's model pools tokens as this one does, and whether it includes the
    head.
    """
    data = config.data
    square = f"{data.image_size} × {data.image_size}"
    view = f"resized to {square} pixels, whatever their shape"
    if data.test_view == "centre_crop":
        view = f"resized to a shorter side of {data.resize} pixels, and cut to the central {square}"
    notes = [f"Note: {note}." for note in (results or {}).get("notes", ())]
    defaults = identity(default_config(config.objective.name))
    changed = {f: value for f, value in identity(config).items() if value != defaults.get(f)}
    return _CARD.format(
        name=name,
        description=describe(config),
        space=create_objective(config).score_space,
        pooling=_in_timm(config, pools_as_timm, head_in_timm),
        view=view,
        mean=list(data.mean),
        std=list(data.std),
        data="\n".join([f"`{data.name}`, in hypjax's split.", *notes]),
        version=__version__,
        fields="\n".join(f"| `{field}` | `{value}` |" for field, value in changed.items()),
        results=_results(config, results),
    )


def describe(config: ConfigDict) -> str:
    """Says in one line what a run's model is: encoder, head, dataset and loss."""
    model, data = config.model, config.data
    encoder, head = model.architecture, f"a head of {model.head_dim} coordinates"
    if encoder == "vit":
        encoder = f"ViT ({model.depth} blocks of width {model.width})"
    return (
        f"{encoder} with {'no head' if model.head == 'none' else head}, for {data.image_size} × "
        f"{data.image_size} pixels, trained on {data.name} with {config.objective.name}"
    )


def _in_timm(config: ConfigDict, pools_as_timm: bool, head_in_timm: bool) -> str:
    text = ""
    if not head_in_timm and config.model.head != "none":
        text += "timm's model lacks the head, a Dense layer after a LayerNorm. "
    if not pools_as_timm:
        text += (
            f"This model pools tokens by `{config.model.eval_pooling}`, which timm's lacks: pool "
            "those of `model.forward_features(images)`, then apply the classifier. "
        )
    return text and f"{text}\n\n"


def _results(config: ConfigDict, results: Mapping[str, Any] | None) -> str:
    if results is None:
        return "The run is not finished."
    states = {state: results[state] for state in _STATES if state in results}
    published = "" if results.get("notes") else compare(results, config)
    return "\n".join(["```", format_results(states), *([published] if published else []), "```"])
