"""The tower of precomputed features beside the images that docs/extending.md adds."""

import dataclasses
from collections.abc import Iterable, Iterator

import jax
import numpy as np
from jaxtyping import Float

from hypjax.config import choose_objective
from hypjax.config import settings as settings_of
from hypjax.data.plans import padded_rows
from hypjax.models import create_embedder, model_shapes
from hypjax.training.states import first_state
from hypjax.training.step import jit_train_step, shard_batch
from hypjax.types import Batch
from tests.helpers import shown_objective
from tests.helpers.steps import learner_of, random_batch, sizes_of


def test_images_are_drawn_towards_their_features(load_glyphs, monkeypatch):
    """In two microbatches; the first loss equals a plain formula, and the second is lower."""
    shown_objective.install(monkeypatch, "A tower", "paired")
    _, _, towers, with_features = shown_objective.blocks("A tower")
    page = vars(settings_of) | dict(Float=Float, np=np, Batch=Batch, padded_rows=padded_rows)
    page |= dict(Iterable=Iterable, Iterator=Iterator)
    exec(towers + with_features, page)
    config = load_glyphs("run.microbatch=12", "optim.warmup_steps=0", "optim.learning_rate=1e-4")
    choose_objective(config, "paired")
    settings = settings_of.model_settings(config)
    model = create_embedder(dataclasses.replace(settings, towers=page["towers"](config)))
    learner = learner_of(config, model=model)
    state = first_state(learner, sizes_of(config))
    params = state.params["model"]
    assert jax.tree.map(np.shape, params) == jax.tree.map(
        lambda x: x.shape, model_shapes(model, settings.encoder.view)
    )

    features = np.random.default_rng(0).normal(size=(24, 7)).astype(np.float32)
    (batch,) = page["with_features"]([random_batch()], features, range(24))
    pixels = (batch.inputs["images"] / 255 - config.data.mean[0]) / config.data.std[0]
    images = model.apply({"params": params}, pixels).projected
    kernel, space = params["towers_features"]["head"]["kernel"], learner.objective.space
    distances = space.distance(space.embed(images)[:, None], space.embed(features @ kernel))
    weights = np.exp(-distances / config.objective.temperature)
    shares = np.diag(weights) ** 2 / (weights.sum(axis=0) * weights.sum(axis=1))
    step, losses = jit_train_step(learner, state), []
    for _ in range(2):
        state, metrics = step(state, shard_batch(learner.mesh, batch))
        losses.append(metrics["loss"])
    np.testing.assert_allclose(losses[0], -np.log(shares).mean() / 2, rtol=1e-4)
    assert losses[1] < losses[0]
