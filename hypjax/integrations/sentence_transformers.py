"""Exports a trained model to a folder that sentence-transformers loads: images in, vectors out.

The encoder is timm's model of the same architecture, which Transformers wraps as
`TimmWrapperModel`; modules of sentence-transformers form the head. Libraries compare the vectors by
cosine. Cosine ranks as the space's distance does if all points are equally far from the origin, as
points of clipped features are: then the distance grows as the cosine falls.
"""

import math
import pathlib
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from hypjax.assemble import open_splits
from hypjax.errors import UserError, writing
from hypjax.experiment.embedding import ONE_SCALE
from hypjax.experiment.method import Method
from hypjax.geometry import PoincareBall, Space
from hypjax.geometry.registry import space_name
from hypjax.inference.model import Model
from hypjax.models import Embedder
from hypjax.models.custom import CustomEncoder
from hypjax.models.pretrained import pools_as_timm, timm_config, timm_state_dict
from hypjax.system.files import replacing, write_json, write_safetensors

_MAX_IMAGES = 2000  # Images for checking that all features are clipped.
_ONNX_HINT = "--format=onnx writes the whole model, with its space"
# Pillow's weights of red, green and blue in grey; they add up to 1.
_GREY = np.array([19595, 38470, 7471]) / 65536
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


def write_folder(workdir: str, folder: pathlib.Path) -> str:
    """Writes a run's best model or, without validation, its last, for sentence-transformers.

    The run's test images show whether cosine ranks as the space's distance does. Returns a sentence
    on the folder and its comparison. Raises a `UserError` if sentence-transformers has no such
    model, or cosine ranks differently.
    """
    embedder = Model(workdir)
    method, space = embedder.method, embedder.space
    _require_supported(method, space)
    reason = _require_cosine(embedder)
    with writing(folder), replacing(folder) as staged:
        staged.mkdir(parents=True)
        _write_modules(staged, method, embedder.params)
    return f'wrote {folder}; SentenceTransformer("{folder}") loads it. {reason}'


def _write_modules(folder: pathlib.Path, method: Method, params: Any) -> None:
    """Writes the model's modules into an empty folder; the last one makes unit vectors."""
    # The encoder's files lie in the folder itself.
    _write_encoder(folder, method, params["encoder"])
    rows = [{"idx": 0, "name": "0", "path": "", "type": _MODULES["Transformer"]}]
    for index, (name, settings, weights) in enumerate(_head_modules(method.model, params), start=1):
        path = f"{index}_{name}"
        rows.append({"idx": index, "name": str(index), "path": path, "type": _MODULES[name]})
        (folder / path).mkdir()
        write_json(folder / path / "config.json", settings)
        if weights:
            write_safetensors(folder / path / "model.safetensors", weights, {"format": "pt"})
    write_json(folder / "modules.json", rows)
    settings = {"model_type": "SentenceTransformer", "similarity_fn_name": "cosine"}
    write_json(folder / "config_sentence_transformers.json", settings)


def _head_modules(model: Embedder, params: Any) -> list[tuple[str, dict, dict]]:
    """Type, settings and weights of each module that follows the encoder."""
    modules = []
    dim = model.encoder.dim
    if model.head_kind == "norm_dense":
        weights = {"norm.weight": np.ones(dim, np.float32), "norm.bias": np.zeros(dim, np.float32)}
        modules.append(("LayerNorm", {"dimension": dim}, weights))
    if model.head_kind != "none":
        kernel = np.asarray(params["head"]["kernel"])
        bias = np.asarray(params["head"].get("bias", np.zeros(model.head_dim, np.float32)))
        settings = {"in_features": dim, "out_features": model.head_dim, "bias": True}
        settings["activation_function"] = "torch.nn.modules.linear.Identity"
        weights = {"linear.weight": kernel.T, "linear.bias": bias}
        modules.append(("Dense", settings, weights))
    return [*modules, ("Normalize", {}, {})]


def _require_supported(method: Method, space: Space) -> None:
    """Rejects a run that modules of sentence-transformers cannot reproduce."""
    encoder = method.model.encoder
    reason = None
    parts = space.parts if space_name(space) == "fused" else [(space, 1.0)]
    if isinstance(encoder, CustomEncoder):
        reason = "has a custom encoder"
    elif not encoder.takes_pixels:
        reason = "was trained on features of another model, and takes no images"
    elif not pools_as_timm(encoder):
        reason = f"pools tokens by {encoder.pooling}, which timm's model cannot; {_ONNX_HINT}"
    elif method.embedding.scales != ONE_SCALE or method.scoring.pca["head"] is not None:
        reason = f"sets eval.scales or eval.pca.head, which no module computes; {_ONNX_HINT}"
    elif method.pixels.view.test == "letterbox":
        reason = f"pads images with black, where Transformers takes their mean; {_ONNX_HINT}"
    elif not {space_name(part) for part, _ in parts} <= {"sphere", "poincare", "lorentz"}:
        reason = f"compares images in {space}, whose distance this format cannot hold"
    if reason:
        raise UserError(f"sentence-transformers has no model for this run, which {reason}")


def _require_cosine(embedder: Model) -> str:
    """Explains why cosine ranks as the space does; raises a `UserError` if it ranks differently."""
    space = embedder.space
    if space.normalized:
        return f"Cosine ranks as the distance in {space} does, for any images."
    features, source = _sample_features(embedder)
    if count := int(np.sum(~_clipped(space, features))):
        why = f"features of {count} of {source} are not clipped, so lengths matter"
        raise UserError(f"cosine does not rank as the distance in {space}: {why}; {_ONNX_HINT}")
    return f"Cosine ranks as the distance in {space} does: all features of {source} are clipped."


def _clipped(space: Space, features: Float[np.ndarray, "n d"]) -> Bool[np.ndarray, " n"]:
    """Marks features that each part of the space maps to points of one norm."""
    # Norms of points cannot show this: in a ball of large c, all are near the boundary.
    if space.parts:
        return np.all([_clipped(part, features) for part, _ in space.parts], axis=0)
    return np.asarray(space.squared | space.clipped(features))


def _sample_features(embedder: Model) -> tuple[Float[np.ndarray, "images dim"], str]:
    """Features of some of the run's images, of the test if there is one, and a description."""
    try:
        splits = open_splits(embedder.config)
        images = splits.images(scored=len(splits.test) > 0)
    except UserError as error:
        problem = f"the run's images, which show whether cosine fits, cannot be read ({error})"
        raise UserError(f"{problem}; {_ONNX_HINT}") from error
    step = math.ceil(len(images) / _MAX_IMAGES)
    embedder.space = PoincareBall(c=0.0, clip_radius=None)  # Points of this space are features.
    sample = embedder.embed_images(images[::step])
    if not len(sample):
        raise UserError(f"none of the run's images can be read; {_ONNX_HINT}")
    source = f"{len(sample)} {'test' if len(splits.test) else 'training'} images"
    if len(sample) < len(images):
        source += f", a sample of {len(images)}"
    return sample.vectors, source


def _write_encoder(folder: pathlib.Path, method: Method, params: Any) -> None:
    """Writes the encoder for Transformers, with its pooled output as the embedding."""
    state = timm_state_dict(params, method.model.encoder)
    settings = timm_config({"encoder": params}, method.model, method.pixels)
    pixels = settings["pretrained_cfg"]
    if method.pixels.view.channels == 1:
        # sentence-transformers passes colour images: the first convolution weights the channels as
        # Pillow does, up to Pillow's rounding of grey to integers.
        first_kernel = next(name for name, value in state.items() if value.ndim == 4)
        state[first_kernel] = (state[first_kernel] * _GREY[:, None, None]).astype(np.float32)
        for field in ("mean", "std"):
            pixels[field] *= 3
        pixels["input_size"][0] = 3
        settings["model_args"].pop("in_chans")
    # Transformers reports missing counts of updates, though they have no effect here.
    for name in list(state):
        if name.endswith("running_mean"):
            state[name.replace("running_mean", "num_batches_tracked")] = np.zeros((), np.int64)
    settings["num_classes"] = pixels["num_classes"] = 0
    write_safetensors(folder / "model.safetensors", state, {"format": "pt"})
    write_json(folder / "config.json", settings)
    write_json(folder / "sentence_bert_config.json", _POOLED)
