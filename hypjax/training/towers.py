"""The towers of a train step: what each takes from a batch, and how the model embeds it."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray, PyTree

from hypjax import parallel
from hypjax.data import device_crops
from hypjax.models import colours
from hypjax.models.layers import mirror, normalize
from hypjax.models.parts import gather
from hypjax.models.split_at_block import upper_blocks
from hypjax.models.vit import draw_drop_path_masks
from hypjax.training import lora
from hypjax.training.learner import Learner
from hypjax.types import IMAGES, Batch, CachedFeatures, Crops, Outputs

_COLOURS = 0xC010  # Folded into the key of colours, so that a loss's key differs.


class Rows(NamedTuple):
    """What the towers embed, with a row for each image and for padding."""

    inputs: Mapping[str, PyTree]  # By tower, as in `Batch`; images are cropped.
    flips: Bool[Array, " rows"]
    drop_path_masks: Float[Array, "rows depth 2"] | None  # None without stochastic depth.


def prepare(
    learner: Learner, key: PRNGKeyArray, batch: Batch, store: device_crops.Store | None
) -> tuple[PRNGKeyArray, Rows]:
    """Crops images, changes their colours, and draws the masks of stochastic depth.

    Returns the loss's key, too. All is drawn for the whole batch, so that the number of devices and
    microbatches does not change the noise.
    """
    images = _augmented_images(learner, key, batch, store)
    key, masks = _draw_masks(learner, key, batch)
    return key, Rows({**batch.inputs, IMAGES: images}, batch.flips, masks)


def embed_all_function(
    learner: Learner, num_slices: int
) -> Callable[[PyTree, Rows], dict[str, Outputs]]:
    """Builds the function that embeds a batch's rows on all devices, with parameters in parts."""
    embed_all = parallel.map_images(
        embed_function(learner), learner.mesh, num_slices, in_parts=True
    )
    if learner.lora is None or parallel.num_parts(learner.mesh) == 1:
        return embed_all
    # A device has no whole kernels into which it could merge adapters.
    return lambda params, rows: embed_all(lora.merged(params, learner.lora), rows)


def embed_function(learner: Learner) -> Callable[[PyTree, Rows], dict[str, Outputs]]:
    """Builds the function that embeds rows with a model's parameters: outputs of each tower.

    The tower of images normalises and mirrors pixels. Cached features enter it above its cached
    block, or at the head.
    """
    model, encoder, pixels = learner.model, learner.model.encoder, learner.pixels

    def embed(params: PyTree, rows: Rows) -> dict[str, Outputs]:
        images = rows.inputs[IMAGES]
        if not isinstance(images, CachedFeatures):
            with jax.named_scope("pixels"):
                images = mirror(normalize(images, pixels.mean, pixels.std), rows.flips)
        # Each slice and device merges the adapters, which is cheap: they then sum and exchange the
        # gradients of adapters, which are smaller than the gradients of kernels.
        with jax.named_scope("adapters"):
            params = lora.merged(params, learner.lora)
        leaving = encoder.gathers if learner.cached_block is None else ()
        params = {
            name: gather(x, leaving=leaving if name == "encoder" else ())
            for name, x in params.items()
        }
        if learner.cached_block is not None:
            example, block = encoder.example(pixels.view), learner.cached_block
            values = upper_blocks(encoder, block, params["encoder"], images.values, example)
            images = CachedFeatures(values)
        inputs = {**rows.inputs, IMAGES: images}
        outputs: Any = model.apply({"params": params}, inputs, rows.drop_path_masks, method="embed")
        return outputs

    return embed


def _augmented_images(
    learner: Learner, key: PRNGKeyArray, batch: Batch, store: device_crops.Store | None
) -> PyTree:
    """What the tower of images takes, cropped from the store, and with changed colours."""
    images = batch.inputs[IMAGES]
    if isinstance(images, Crops):
        crop = functools.partial(device_crops.crop, side=learner.pixels.view.side)
        with jax.named_scope("crop"):
            images = parallel.map_local_images(crop, learner.mesh)(store, images)
    if learner.colour_changes is not None:
        with jax.named_scope("colours"):
            key, batch_size = jax.random.fold_in(key, _COLOURS), len(batch.labels)
            draws = colours.draw_changes(key, learner.colour_changes, batch_size)
            # Rows that pad the images repeat the last draw.
            rows = jnp.minimum(jnp.arange(len(images)), batch_size - 1)
            draws = jax.tree.map(lambda x: x[rows], draws)
            change = parallel.map_local_images(lambda _, *x: colours.changed(*x), learner.mesh)
            images = change((), images, draws)
    return images


def _draw_masks(
    learner: Learner, key: PRNGKeyArray, batch: Batch
) -> tuple[PRNGKeyArray, Float[Array, "rows depth 2"] | None]:
    """Returns the loss's key and, with stochastic depth, the masks of all rows (padding: 0)."""
    if not (rate := learner.step.drop_path):
        return key, None
    key, mask_key = jax.random.split(key)
    batch_size, depth = len(batch.labels), learner.model.encoder.depth
    masks = draw_drop_path_masks(mask_key, rate, depth, batch_size)
    return key, jnp.pad(masks, ((0, len(batch.flips) - batch_size), (0, 0), (0, 0)))
