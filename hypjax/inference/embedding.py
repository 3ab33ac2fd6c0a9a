"""From images to points of the spaces in which a model is scored."""

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree, UInt8
from ml_collections import ConfigDict

from hypjax.errors import UserError
from hypjax.geometry import Space
from hypjax.geometry.learned import learned_values
from hypjax.geometry.registry import create_space
from hypjax.models import Embedder
from hypjax.models.embedder import at_side, resize_images, scaled_side
from hypjax.models.layers import normalize
from hypjax.objectives import Objective
from hypjax.objectives.matryoshka import trained_prefixes
from hypjax.types import Outputs

Spaces = Callable[[PyTree], Mapping[str, Space]]  # By name, from the parameters of a model.


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
    whole = outputs.projected if part_of(name) == "head" else outputs.pooled
    if not dim:
        return whole
    if int(dim) >= whole.shape[-1]:  # The configuration does not know the dimension of an encoder.
        raise UserError(
            f"a prefix of {dim} dimensions is not shorter than the head's output, which has "
            f"{whole.shape[-1]}; lower config.eval.prefixes"
        )
    return whole[:, : int(dim)]


PixelScaling = tuple[Sequence[float], Sequence[float]]  # Mean and standard deviation by channel.
ONE_SCALE = (1.0,)


def embed_function(
    model: Embedder,
    pixel_scaling: PixelScaling,
    spaces: Spaces,
    scales: Sequence[float] = ONE_SCALE,
) -> Callable[[PyTree, UInt8[Array, "batch side side channels"]], dict[str, Array]]:
    """Returns the function from parameters and pixels to the points of each space, to be jitted.

    Scales are sides of the images that the model sees, relative to the given ones (`scaled_side`).
    Of several, it returns the mean of the points in their space.
    """
    encode, place = encode_function(model, pixel_scaling, scales), place_function(model, spaces)
    return lambda params, images: place(params, encode(params, images))


def encode_function(
    model: Embedder, pixel_scaling: PixelScaling, scales: Sequence[float] = ONE_SCALE
) -> Callable[[PyTree, UInt8[Array, "batch side side channels"]], list[Array]]:
    """Returns the first half of `embed_function`: the encoder's embeddings, one array per scale."""

    def encode_at(
        scale: float, params: PyTree, images: Float[Array, "..."]
    ) -> Float[Array, "batch encoder_dim"]:
        side, scaled = scaled_side(model.encoder, scale), model
        if side != model.encoder.image_size:
            scaled, params = at_side(model, params, side)
            images = resize_images(images, side)
        with jax.named_scope("encoder"):  # As in the train step, for profiles of the program.
            found = scaled.encoder.apply({"params": params["encoder"]}, images)
        return found.astype(jnp.float32)

    def encode(params: PyTree, images: Array) -> list[Array]:
        if not model.encoder.takes_pixels:
            return [images]
        images = normalize(images, *pixel_scaling)
        return [encode_at(scale, params, images) for scale in scales]

    return encode


def place_function(
    model: Embedder, spaces: Spaces
) -> Callable[[PyTree, Sequence[Float[Array, "batch encoder_dim"]]], dict[str, Array]]:
    """Returns the second half of `embed_function`, which needs no parameters of the encoder."""

    def place_one(params: PyTree, pooled: Float[Array, "batch encoder_dim"]) -> dict[str, Array]:
        outputs: Outputs = model.apply({"params": params}, pooled, method="project")
        own = spaces(params).items()
        return {name: space.embed(_features(outputs, name)) for name, space in own}

    def place(params: PyTree, pooled: Sequence[Array]) -> dict[str, Array]:
        points = [place_one(params, each) for each in pooled]
        if len(points) == 1:
            return points[0]
        return {
            name: space.mean(jnp.stack([each[name] for each in points], axis=-2))
            for name, space in spaces(params).items()
        }

    return place
