"""Writes folders of published models, which `hypjax.load` and all commands read."""

import contextlib
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from flax.traverse_util import flatten_dict
from jaxtyping import PyTree

from hypjax.assemble import assemble_method
from hypjax.config import default_config, identity, validate
from hypjax.config.choices import CUSTOM, IN_MEMORY
from hypjax.config.custom import choosing, custom_name, write_space
from hypjax.errors import UserError, at_the_call, writing
from hypjax.experiment.method import Method
from hypjax.experiment.trained import TrainedModel
from hypjax.geometry import Space
from hypjax.geometry.registry import describe_space
from hypjax.models import Embedder
from hypjax.models.architectures import UNSIZED, is_in_timm
from hypjax.models.custom import CustomEncoder
from hypjax.models.encoder import FEATURES
from hypjax.models.pretrained import save_timm, timm_config
from hypjax.runs import files
from hypjax.runs.workdir import SPACE
from hypjax.system.files import replacing, sha256, with_checksum, write_json, write_safetensors

_ELSEWHERE = custom_name("a loop of its own")  # Objective of models not trained by hypjax.


@at_the_call
def save(
    params: PyTree,
    space: Space,
    workdir: str | os.PathLike[str],
    *,
    encoder: nn.Module,
    image_size: int,
    channels: int = 3,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    resize: int | None = None,
    test_view: str = "centre_crop",
) -> None:
    """Saves a trained model for `hypjax.load`, `hypjax.embed` and `hypjax.search`.

    A custom encoder's code is not saved: pass it to `hypjax.load` as `encoder=`.

    Args:
        params: The model's parameters, shaped as `encoder.init(...)["params"]`.
        space: The space whose `embed` maps the model's output to points.
        workdir: Folder to write. An earlier model in the folder is replaced; the folder may hold
            nothing else.
        encoder: The model: a Flax module that maps normalised pixels [images, height, width,
            channels] to [images, dim], or an `Embedder`, which is an encoder with a head.
        image_size: Side of the model's input images in pixels.
        channels: 3 for RGB, 1 for greyscale.
        mean: Mean of each channel of pixels from 0 to 1, to normalise images; by default 0.5.
        std: Deviation of each channel; by default 0.5.
        resize: Shorter side of images before they are cropped; by default `image_size`.
        test_view: 'centre_crop'; 'letterbox', which pads images to squares; or 'squash', which
            resizes them to squares.

    Raises:
        UserError: Parameters do not fit, the space is not registered, or the folder cannot be
            written.
    """
    model = encoder if isinstance(encoder, Embedder) else None
    config = default_config(_ELSEWHERE)
    config.data.update(name=IN_MEMORY, test_view=test_view, channels=channels)
    config.data.update(image_size=image_size, resize=resize or image_size)
    for field, values in (("mean", mean), ("std", std)):
        config.data[field] = tuple(map(float, (0.5,) * channels if values is None else values))
    config.optim.frozen = ()
    config.model.head = "none"
    if model:
        config.model.update(head=model.head_kind, head_dim=model.head_dim)
    write_space(config, space)
    with choosing(config, encoder=model.encoder if model else encoder):
        validate(config)
        method = assemble_method(config, saved_space=space)
    params = jax.tree.map(np.asarray, params if model else {"encoder": params})
    params = {part: tree for part, tree in params.items() if part != "scalars"}  # `space` has them.
    _require_shapes(params, method.shapes)
    with replacing_model(pathlib.Path(workdir).expanduser()) as staged:
        write_model(staged, TrainedModel(method, params), provenance={})


def _require_shapes(params: PyTree, expected: PyTree) -> None:
    """Raises a `UserError` for the first parameter that is missing, unknown or misshapen."""
    trees = (jax.tree.map(lambda x: x.shape, tree) for tree in (params, expected))
    shapes, expected_shapes = (flatten_dict(tree, sep="/") for tree in trees)
    if wrong := shapes.items() ^ expected_shapes.items():
        name, _ = min(wrong)
        problem = f"has the shape {shapes.get(name)}, but encoder.init gives"
        raise UserError(f"the parameter {name} {problem} {expected_shapes.get(name)}")


def describe(method: Method) -> str:
    """Describes a run's model in one line: encoder, head, dataset and loss."""
    fields, model = method.fields, method.model
    names = fields["model.architecture"], fields["objective.name"]
    encoder, loss = (name.removeprefix(CUSTOM) for name in names)
    head = f"a head of {model.head_dim} coordinates"
    images = "images from Python" if fields["data.name"] == IN_MEMORY else fields["data.name"]
    if encoder == FEATURES:
        return f"features of {model.encoder.dim} coordinates with {head}, trained by {loss}"
    if encoder in UNSIZED:
        encoder = f"ViT ({fields['model.depth']} blocks of width {model.encoder.dim})"
    side = method.pixels.view.side
    if model.head_kind == "none":
        head = "no head"
    images_tower = f"{encoder} with {head}, for {side} × {side} pixels"
    if method.fields["model.text.kind"] == FEATURES:
        return f"{images_tower} and a head on texts, trained on {images} with {loss}"
    if model.towers:
        return f"{loss}: {images_tower}, and texts of up to {fields['model.text.context']} tokens"
    return f"{images_tower}, trained on {images} with {loss}"


@contextlib.contextmanager
def replacing_model(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields an empty folder, which replaces a folder's model when the context ends normally."""
    with writing(folder):
        names = {path.name for path in folder.iterdir()} if folder.exists() else set()
        if files.PUBLISHED in names:
            names -= {files.PROJECTIONS.rstrip("/"), "README.md", *files.MODEL_FILES}
        if names:
            raise UserError(f"{folder} holds {min(names)}, no model; name another folder")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with replacing(folder.resolve()) as staged:
            staged.mkdir()
            yield staged


def write_model(folder: pathlib.Path, trained: TrainedModel, provenance: Mapping[str, Any]) -> None:
    """Writes weights, configuration and space; for an encoder that timm has, also config.json."""
    method, model, params = trained.method, trained.model, trained.params
    save_timm(folder / files.WEIGHTS, params, model)
    if model.head_kind in ("norm_dense", "linear"):  # timm has no such heads.
        write_safetensors(folder / files.HEAD, params["head"])
    if model.towers:
        towers = {name: tree for name, tree in params.items() if name.startswith("towers_")}
        write_safetensors(folder / files.TOWERS, flatten_dict(towers, sep="."))
    if not isinstance(model.encoder, CustomEncoder) and is_in_timm(model.encoder):
        write_json(folder / files.CONFIG, timm_config(params, model, method.pixels))
    content = {"provenance": provenance, "all": identity(method.fields)}  # Without `config.run`.
    content[SPACE] = describe_space(method.trained_objective(params).score_space)
    if "scalars" in params:
        logs = params["scalars"].items()
        content[files.LEARNED] = {name: np.asarray(log).tolist() for name, log in logs}
    content[files.CHECKSUMS] = {x.name: sha256(x) for x in folder.glob("*.safetensors")}
    write_json(folder / files.PUBLISHED, with_checksum(content))
