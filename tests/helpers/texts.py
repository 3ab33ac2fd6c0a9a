"""A small model of images and texts, with random weights, and its tokenizer."""

import functools
import gzip

import jax
import numpy as np

from hypjax.geometry import Lorentz
from hypjax.models import create_embedder
from hypjax.models.language_image import LanguageImage
from hypjax.models.tokens import MERGES
from hypjax.settings import EncoderSettings, ModelSettings, Pixels, TextSettings
from hypjax.types import TEXTS, View

CONTEXT = 20


@functools.cache
def released(space=None, seed=0, head="linear"):
    """A model of images of 32 pixels and texts of at most 20 tokens.

    It has 8 coordinates, or without a head on images, as many as its encoders.
    """
    view = View(32, 32, 3)
    encoder = EncoderSettings(
        "vit", view, patch_size=16, width=16, depth=1, num_heads=2, norm_eps=1e-5
    )
    texts = TextSettings(16, 1, 2, vocabulary=514, context=CONTEXT)
    dim = 16 if head == "none" else 8
    settings = ModelSettings(encoder, head, dim, {TEXTS: ModelSettings(texts, "linear", dim)})
    initialise = jax.jit(create_embedder(settings).initial_parameters, static_argnums=1)
    params = jax.tree.map(np.asarray, initialise(jax.random.key(seed), view))
    space = Lorentz(0.7, clip_radius=None, feature_scale=0.5) if space is None else space
    pixels = Pixels(view, (0.4, 0.5, 0.6), (0.2, 0.3, 0.4))
    return LanguageImage("MERU", settings, params, space, pixels, scale=20.0, bias=0.0)


def write_tokenizer(folder):
    """Writes a vocabulary of letters without merges."""
    (folder / MERGES).write_bytes(gzip.compress(b"#version\n"))
    return folder / MERGES
