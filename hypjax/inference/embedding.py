"""From images to points of the spaces in which a model is scored."""

import hashlib
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax.errors import FlaxError
from jaxtyping import Array, Float, PyTree, UInt8
from ml_collections import ConfigDict

from hypjax.errors import UserError, reason
from hypjax.geometry import Space
from hypjax.geometry.learned import learned_values
from hypjax.models import Embedder
from hypjax.models.embedder import at_side, resize_images, scaled_side
from hypjax.models.layers import normalize
from hypjax.objectives import Objective
from hypjax.objectives.create import create_space
from hypjax.objectives.matryoshka import trained_prefixes
from hypjax.types import Outputs

PixelScaling = tuple[Sequence[float], Sequence[float]]  # Mean and standard deviation by channel.
ONE_SCALE = (1.0,)


def scored_spaces(config: ConfigDict, objective: Objective, params: PyTree) -> dict[str, Space]:
    """The spaces in which `eval.spaces` compares the embeddings of a model, by name.

    Names are "head" and "encoder" and, for further spaces of a part, as in "head:sphere". Defaults
    are the objective's space for the head, and cosine for the encoder (Hyp-ViT, Section 4.2). A
    curvature that the model has learned is that of all of them. Prefixes of the head's output, of
    `eval.prefixes` and of the objective, have names such as "head@16" and "head@16:sphere".
    """
    spaces, fields = {}, config.objective
    scalars = learned_values(fields, params)
    prefixes = sorted({*config.eval.prefixes, *trained_prefixes(config)})
    for part in ("head", *(f"head@{dim}" for dim in prefixes), "encoder"):
        for i, name in enumerate(config.eval.spaces[part_of(part)]):
            if name == "objective":
                space = objective.with_scalars(scalars).score_space
            else:
                space = create_space(ConfigDict({**fields, "space": name})).with_scalars(scalars)
            spaces[f"{part}:{name}" if i else part] = space
    return spaces


def part_of(name: str) -> str:
    """The part of the model behind a name of `scored_spaces`."""
    return name.partition(":")[0].partition("@")[0]


def _features(outputs: Outputs, name: str) -> Float[Array, "batch d"]:
    """The features behind a name of `scored_spaces`, which its space embeds."""
    dim = name.partition(":")[0].partition("@")[2]
    full = outputs.projected if part_of(name) == "head" else outputs.pooled
    if not dim:
        return full
    if int(dim) >= full.shape[-1]:  # The configuration does not know the dimension of an encoder.
        raise UserError(
            f"a prefix of {dim} dimensions is not shorter than the head's output, which has "
            f"{full.shape[-1]}; lower config.eval.prefixes"
        )
    return full[:, : int(dim)]


def encode(
    model: Embedder,
    pixel_scaling: PixelScaling,
    scales: Sequence[float],
    params: PyTree,
    images: UInt8[Array, "batch side side channels"],
) -> list[Float[Array, "batch encoder_dim"]]:
    """The encoder's embeddings of pixels at each scale; given features are returned as they are.

    Scales are sides of the images that the model sees, relative to the given ones (`scaled_side`).
    """
    if not model.encoder.takes_pixels:
        return [images]
    images, embeddings = normalize(images, *pixel_scaling), []
    for scale in scales:
        scaled, scaled_params, resized = model, params, images
        side = scaled_side(model.encoder, scale)
        if side != model.encoder.image_size:
            scaled, scaled_params = at_side(model, params, side)
            resized = resize_images(images, side)
        try:
            with jax.named_scope("encoder"):  # As in the train step, for profiles of the program.
                pooled = scaled.encoder.apply({"params": scaled_params["encoder"]}, resized)
        except (FlaxError, TypeError, ValueError) as error:  # Of a module of the user's.
            if scaled is model:
                raise
            raise UserError(
                f"the encoder cannot embed images of {side} × {side} pixels, for which "
                f"config.eval.scales asks ({reason(error)}); set --config.eval.scales=1"
            ) from error
        embeddings.append(pooled.astype(jnp.float32))
    return embeddings


def place(
    model: Embedder,
    params: PyTree,
    spaces: Mapping[str, Space],
    pooled: Sequence[Float[Array, "batch encoder_dim"]],
) -> dict[str, Float[Array, "batch d"]]:
    """Maps the encoder's embeddings to points of each space; of several scales, to their mean.

    It needs no parameters of the encoder.
    """
    outputs = [model.apply({"params": params}, each, method="project") for each in pooled]
    points = {
        name: [space.embed(_features(each, name)) for each in outputs]
        for name, space in spaces.items()
    }
    if len(outputs) == 1:
        return {name: of_scales[0] for name, of_scales in points.items()}
    return {name: spaces[name].mean(jnp.stack(each, axis=-2)) for name, each in points.items()}


def embed_function(
    model: Embedder,
    pixel_scaling: PixelScaling,
    spaces: Mapping[str, Space],
    scales: Sequence[float] = ONE_SCALE,
) -> Callable[[PyTree, UInt8[Array, "batch side side channels"]], dict[str, Array]]:
    """Returns the function from parameters and pixels to the points of each space, to be jitted."""
    return lambda params, images: place(
        model, params, spaces, encode(model, pixel_scaling, scales, params, images)
    )


def fingerprint(facts: object, params: PyTree = None) -> str:
    """Hash of facts, whose `repr` says all about them, and of parameters."""
    digest = hashlib.sha256(repr(facts).encode())
    for leaf in jax.tree.leaves(params):
        digest.update(np.ascontiguousarray(leaf))
    return digest.hexdigest()[:32]
