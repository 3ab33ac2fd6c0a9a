"""A trained model as a folder that sentence-transformers loads: images in, vectors out.

The encoder is timm's model of this architecture, which Transformers wraps as `TimmWrapperModel`;
modules of sentence-transformers follow for the head. Libraries compare such vectors by their
cosine. It ranks as a distance does where all points are equally far from the origin of the space,
as features are that the clip radius shortens: then the distance grows as the cosine falls.
"""

import pathlib
from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from ml_collections import ConfigDict
from safetensors.numpy import save_file

from hypjax import __version__
from hypjax.data.photos import find_images
from hypjax.errors import UserError, writing
from hypjax.geometry import PoincareBall, Space
from hypjax.geometry.registry import describe_space, space_name
from hypjax.inference.embedding import ONE_SCALE
from hypjax.inference.model import Model
from hypjax.inference.save import describe
from hypjax.models import Embedder
from hypjax.models.custom import CustomEncoder
from hypjax.models.pretrained import pools_as_timm, timm_config, timm_state_dict
from hypjax.system.files import replacing, write_json, write_text

_MOST_IMAGES = 2000  # Whose norms are compared.
_ELSEWHERE = "--format=onnx writes the whole model, with its space"
# Pillow's weights of red, green and blue in grey, which add up to 1.
_GREY = np.array([19595, 38470, 7471]) / 65536
_FEATURES = (
    "Vectors are features, whose lengths matter. `distance.py` computes their distance in {space}. "
    "Cosine may rank differently."
)
_MODULES = {
    "Transformer": "sentence_transformers.base.modules.transformer.Transformer",
    "LayerNorm": "sentence_transformers.sentence_transformer.modules.layer_norm.LayerNorm",
    "Dense": "sentence_transformers.base.modules.dense.Dense",
    "Normalize": "sentence_transformers.base.modules.normalize.Normalize",
}
_POOLED = {
    "transformer_task": "feature-extraction",
    "modality_config": {"image": {"method": "forward", "method_output_name": "pooler_output"}},
    "module_output_name": "sentence_embedding",
}
_CARD = """\
---
library_name: sentence-transformers
pipeline_tag: image-feature-extraction
tags:
- sentence-transformers
- timm
- image-retrieval
- metric-learning
---

# Embeddings for image retrieval

{description}. Trained by hypjax {version} in {space}.

```python
from PIL import Image
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("{name}")
images = [Image.open(path).convert("RGB") for path in ("one.jpg", "two.jpg")]
vectors = model.encode(images)
{compare}
```

{exact}
"""
_DISTANCE = '''\
"""The distance in {space} between features: what this model is trained to rank by."""

import numpy as np

SPACE = {described}
MAX_NORM = 1 - 1e-5  # Of √c times a point of the ball, as in training.


def points(features, space):
    """Maps features [n, dim] to points of the sphere or of the Poincaré ball."""
    norms = np.linalg.norm(features, axis=1, keepdims=True)
    directions = features / np.maximum(norms, 1e-30)
    if space["name"] == "sphere":
        return directions
    root, norms = np.sqrt(max(space["c"], 1e-12)), norms * space.get("feature_scale", 1)
    if space["max_distance"] is not None:  # Features are rescaled instead of being clipped.
        longest = space["max_distance"] / 2
        norms = longest * np.tanh(np.arctanh(0.99) / 3 / longest * norms)
    elif space["clip_radius"] is not None:
        norms = np.minimum(norms, space["clip_radius"])
    return directions * np.minimum(np.tanh(root * norms), MAX_NORM) / root


def distance(x, y, space=SPACE):
    """Distances [n, m] between features [n, dim] and features [m, dim]; nearest is smallest."""
    x, y = np.asarray(x, float), np.asarray(y, float)
    if space["name"] == "fused":  # Several spaces: a weighted sum of distances.
        if space["normalized"]:
            x, y = (points(features, {{"name": "sphere"}}) for features in (x, y))
        return sum(weight * distance(x, y, part) for part, weight in space["parts"])
    x, y = points(x, space), points(y, space)
    squares = np.stack([np.sum((point - y) ** 2, axis=1) for point in x])
    if space["name"] == "sphere":
        return squares
    c = max(space["c"], 1e-12)
    gaps = np.outer(*(1 - c * np.sum(p * p, axis=1) for p in (x, y)))
    return 2 / np.sqrt(c) * np.arcsinh(np.sqrt(c * squares / gaps))
'''
_WRITTEN = {"sphere", "poincare", "lorentz"}  # Spaces whose distances that computes.


def write_folder(
    workdir: str, folder: pathlib.Path, *, images: str | None = None, features: bool = False
) -> str:
    """Writes a run's best model, or else its last, for sentence-transformers.

    `images` are those to search among, by default the run's test images. With `features`, vectors
    are the head's outputs, compared by `distance.py`, instead of unit vectors. Returns where the
    folder is, and why its comparison is exact. Raises a `UserError` if sentence-transformers has
    no such model, or cosine would rank differently.
    """
    embedder = Model(workdir)
    config, model, space = embedder.config, embedder.module, embedder.space
    _require_counterpart(config, model, space)
    exact = _FEATURES.format(space=space) if features else _by_cosine(embedder, images)
    compare = "similarities = model.similarity(vectors, vectors)  # Cosines."
    if features:
        compare = "distances = distance(vectors, vectors)  # From distance.py in the folder."
    with writing(folder), replacing(folder) as staged:
        staged.mkdir(parents=True)
        write_model(staged, config, model, embedder.params, normalize=not features)
        if features:
            source = _DISTANCE.format(space=space, described=describe_space(space))
            write_text(staged / "distance.py", source)
        values = {"description": describe(config), "version": __version__, "name": folder.name}
        values |= {"space": space, "exact": exact, "compare": compare}
        write_text(staged / "README.md", _CARD.format(**values))
    return f"wrote {folder}, whose README.md says how to load it. {exact}"


def write_model(
    folder: pathlib.Path, config: ConfigDict, model: Embedder, params: Any, *, normalize: bool
) -> None:
    """Writes what sentence-transformers reads into an empty folder; `normalize` ends the model."""
    _write_encoder(folder, config, model, params["encoder"])
    modules, dim = [("Transformer", {}, None)], model.encoder.dim
    if model.head_kind == "norm_dense":
        weights = {"norm.weight": np.ones(dim, np.float32), "norm.bias": np.zeros(dim, np.float32)}
        modules.append(("LayerNorm", {"dimension": dim}, weights))
    if model.head_kind != "none":
        kernel, bias = (np.asarray(params["head"][name]) for name in ("kernel", "bias"))
        settings = {"in_features": dim, "out_features": model.head_dim, "bias": True}
        settings["activation_function"] = "torch.nn.modules.linear.Identity"
        weights = {"linear.weight": np.ascontiguousarray(kernel.T), "linear.bias": bias}
        modules.append(("Dense", settings, weights))
    if normalize:
        modules.append(("Normalize", {}, None))
    listed = []
    for i, (name, settings, weights) in enumerate(modules):
        path = f"{i}_{name}" if i else ""
        listed.append({"idx": i, "name": str(i), "path": path, "type": _MODULES[name]})
        if i:
            (folder / path).mkdir()
            write_json(folder / path / "config.json", settings)
        if weights:
            save_file(weights, folder / path / "model.safetensors", {"format": "pt"})
    write_json(folder / "modules.json", listed)
    settings = {"model_type": "SentenceTransformer", "similarity_fn_name": "cosine"}
    write_json(folder / "config_sentence_transformers.json", settings)


def _require_counterpart(config: ConfigDict, model: Embedder, space: Space) -> None:
    encoder, reason = model.encoder, None
    parts = space.parts if space_name(space) == "fused" else [(space, 1.0)]
    if isinstance(encoder, CustomEncoder):
        reason = "has an encoder of your own"
    elif not encoder.takes_pixels:
        reason = "was trained on features of another model, and takes no images"
    elif not pools_as_timm(encoder):
        reason = f"pools tokens by {encoder.pooling}, which timm's model cannot; {_ELSEWHERE}"
    elif tuple(config.eval.scales) != ONE_SCALE or config.eval.pca.head is not None:
        reason = f"sets eval.scales or eval.pca.head, for which there is no module; {_ELSEWHERE}"
    elif not {space_name(part) for part, _ in parts} <= _WRITTEN:
        reason = f"compares images in {space}, whose distance hypjax does not write"
    if reason:
        raise UserError(f"sentence-transformers has no such model: this run {reason}")


def _by_cosine(embedder: Model, images: str | None) -> str:
    """Explains why cosine ranks as the space does; raises a `UserError` where it does not."""
    space = embedder.space
    if space.normalized:
        return f"Cosine ranks as the distance in {space} does, whatever the images."
    features, what = _sample(embedder, images)
    if count := int(np.sum(~_one_length(space, features))):
        why = f"features of {count} of {what} are not clipped, so lengths matter"
        raise UserError(f"cosine does not rank as the distance in {space}: {why}; add --features")
    why = f"the features of {what} are all clipped to one length"
    return f"Cosine ranks as the distance in {space} does: {why}."


def _one_length(space: Space, features: Float[np.ndarray, "n d"]) -> Bool[np.ndarray, " n"]:
    """Marks features that the space brings to one length; in a ball of large c, points hide it."""
    if space.parts:
        return np.all([_one_length(part, features) for part, _ in space.parts], axis=0)
    return np.asarray(space.squared | space.clipped(features))


def _sample(embedder: Model, where: str | None) -> tuple[Float[np.ndarray, "images dim"], str]:
    if where is not None:
        images, what = find_images(where), f"images in {where}"
    else:
        try:
            images, what = embedder.run.splits.images(scored=True), "test images"
        except UserError as error:
            problem = f"the run's images, on which cosine is tested, cannot be read ({error})"
            raise UserError(f"{problem}; name a folder as --images") from error
    chosen = images[:: -(-len(images) // _MOST_IMAGES)]
    embedder.space = PoincareBall(c=0.0, clip_radius=None)  # Its points are the features.
    embedded = embedder.embed_images(chosen)
    if not len(embedded):
        raise UserError(f"none of {len(chosen)} {what} can be read; name others as --images")
    if len(embedded) < len(images):
        what += f", a sample of {len(images)}"
    return embedded.vectors, f"{len(embedded)} {what}"


def _write_encoder(folder: pathlib.Path, config: ConfigDict, model: Embedder, params: Any) -> None:
    """Writes the encoder for Transformers, and that its pooled output is the embedding."""
    state = timm_state_dict(params, model.encoder)
    settings = timm_config({"encoder": params}, model, config.data)
    pixels = settings["pretrained_cfg"]
    if config.data.channels == 1:
        # The model takes images in colour: its first convolution weighs colours as Pillow does,
        # which then rounds grey to integers.
        first = next(name for name, value in state.items() if value.ndim == 4)
        state[first] = np.float32(state[first] * _GREY[:, None, None])
        for field in ("mean", "std"):
            pixels[field] *= 3
        pixels["input_size"][0] = 3
        settings["model_args"].pop("in_chans")
    # Counts of updates, which do nothing here; Transformers would report them as missing.
    for name in [name for name in state if name.endswith("running_mean")]:
        state[name.replace("running_mean", "num_batches_tracked")] = np.zeros((), np.int64)
    settings["num_classes"] = pixels["num_classes"] = 0
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    write_json(folder / "config.json", settings)
    write_json(folder / "sentence_bert_config.json", _POOLED)
