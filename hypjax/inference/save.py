"""A model that was trained elsewhere, written so that `hypjax.load` and all commands read it."""

import os
import pathlib
from collections.abc import Sequence

import flax.linen as nn
import jax
import numpy as np
from flax.traverse_util import flatten_dict
from jaxtyping import PyTree
from ml_collections import ConfigDict

from hypjax.config import default_config, validate
from hypjax.config.choices import GIVEN
from hypjax.config.own import choose_encoder, choose_space, own_name
from hypjax.errors import UserError, writing
from hypjax.geometry import Space
from hypjax.inference.model_folder import replacing_model, write_model
from hypjax.models import Embedder, create_embedder, model_shapes
from hypjax.types import View

_ELSEWHERE = own_name("a loop of its own")  # The objective of such a model.


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
    """Saves a trained model, which `hypjax.load`, `hypjax.embed` and `hypjax.search` then read.

    Where the encoder is not one of hypjax's, they need its code: pass the module to `hypjax.load`
    as `encoder=`. Its weights are named by their paths in Flax.

    Args:
        params: The model's parameters: what `encoder.init(...)["params"]` has the shapes of.
        space: The space whose `embed` maps the model's output to points.
        workdir: Folder to write. An earlier model of hypjax's in it is replaced; a folder that
            holds anything else is refused.
        encoder: The model: a Flax module that maps normalised pixels [images, height, width,
            channels] to [images, dim], or an `Embedder`, which is an encoder with a head.
        image_size: Side of the images that it takes, in pixels.
        channels: 3 for RGB, 1 for greyscale.
        mean: Mean of each channel, for pixels from 0 to 1, with which images are normalised;
            by default 0.5.
        std: Deviation of each channel; by default 0.5.
        resize: Shorter side of images before they are cropped; by default `image_size`.
        test_view: 'centre_crop', or 'squash', which resizes images to squares.

    Raises:
        UserError: The parameters are not the model's, the space has no name, or the folder cannot
            be written.
    """
    head = encoder if isinstance(encoder, Embedder) else None
    config = _config(space, head, head.encoder if head else encoder, image_size, channels)
    config.data.update(test_view=test_view, resize=resize or image_size)
    config.data.mean, config.data.std = (
        tuple(map(float, (0.5,) * channels if values is None else values)) for values in (mean, std)
    )
    validate(config)
    model = create_embedder(config, evaluating=True)
    params = jax.tree.map(np.asarray, params if head else {"encoder": params})
    params = {part: own for part, own in params.items() if part != "space"}  # It is given.
    _check(params, model_shapes(model, View.of(config.data)))
    folder = pathlib.Path(workdir).expanduser()
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with replacing_model(folder) as staged:
            write_model(staged, config, model, params, space, provenance={})


def _config(
    space: Space, head: Embedder | None, encoder: nn.Module, side: int, channels: int
) -> ConfigDict:
    """The configuration of a model, but for its pixels."""
    config = default_config(_ELSEWHERE)
    config.data.update(name=GIVEN, image_size=side, channels=channels)
    config.model.head = head.head_kind if head else "none"
    config.model.head_dim = head.head_dim if head else config.model.head_dim
    config.optim.frozen = ()
    choose_space(config, space)
    choose_encoder(config, encoder)
    return config


def _check(params: PyTree, shapes: PyTree) -> None:
    """Raises an error at the first parameter that the model has not, or lacks."""
    found, expected = (
        {"/".join(path): leaf.shape for path, leaf in flatten_dict(tree).items()}
        for tree in (params, shapes)
    )
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            raise UserError(
                f"the parameter {name} has the shape {found.get(name)}, but the model's "
                f'{expected.get(name)}; give what encoder.init(...)["params"] has the shapes of'
            )
