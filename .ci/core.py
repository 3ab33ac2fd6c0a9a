"""Uses the core in an environment that has only its own libraries and what these need."""

import importlib.util
import sys

import numpy as np

import hypjax.geometry
import hypjax.models
import hypjax.objectives
import hypjax.retrieval
from hypjax.settings import EncoderSettings, ModelSettings
from hypjax.types import View

# With one of these, the environment would show nothing.
ABSENT = ("PIL", "filelock", "grain", "ml_collections", "tqdm")

if present := [name for name in ABSENT if importlib.util.find_spec(name)]:
    sys.exit(f"error: {', '.join(present)} are installed; run this in an empty environment")
ball = hypjax.geometry.PoincareBall(0.1, 2.3)
features = np.random.default_rng(0).normal(size=(4, 2, 8)).astype(np.float32)
points = np.asarray(ball.embed(features.reshape(8, 8)))
distances, ids = hypjax.retrieval.nearest_neighbors(points, points, k=1, space=ball)
assert ids[:, 0].tolist() == [*range(8)] and not distances.any()
hypjax.retrieval.recall_at_k(points, np.arange(8) // 2, ks=[1], space=ball)
embeddings = ball.embed(features)
loss = hypjax.objectives.pairwise_cross_entropy(embeddings, space=ball, temperature=0.2)
assert np.isfinite(loss)
encoder = EncoderSettings("vit", View(8, 8, 3), "cls", patch_size=4, width=8, depth=1, num_heads=2)
model = hypjax.models.create_embedder(ModelSettings(encoder, head="dense", head_dim=4))
shapes = hypjax.models.model_shapes(model, View(8, 8, 3))
assert shapes["head"]["kernel"].shape == (8, 4)
