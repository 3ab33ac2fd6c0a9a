"""Trains a head by hand, with geometry, objectives and retrieval only: a tutorial of one minute.

    python examples/train_by_hand.py

A class is a direction in 8 of 64 features; its images add noise in all of them. A head that is
trained on some classes learns to leave the noise out, and so finds images of other classes.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hypjax.geometry import PoincareBall
from hypjax.objectives import pairwise_cross_entropy
from hypjax.retrieval import bootstrap_intervals, nearest_neighbors, query_scores

CLASSES, IMAGES, FEATURES, DIM, STEPS = 200, 4, 64, 16, 100

# 1. Data: features of 4 images of each of 200 classes. The second half of the classes is the test.
rng = np.random.default_rng(0)
centres = rng.normal(size=(CLASSES, 1, FEATURES)) * (np.arange(FEATURES) < 8)
features = centres + 0.3 * rng.normal(size=(CLASSES, IMAGES, FEATURES))
train, test = np.split(features.astype(np.float32), 2)
labels = np.repeat(np.arange(len(test)), IMAGES)

# 2. A space. Features are clipped at norm 2.3 and mapped into the ball of curvature −0.1, where
# distances grow towards the boundary. `Sphere()` in its place compares by the cosine.
ball = PoincareBall(c=0.1, clip_radius=2.3)

# 3. A model: one linear map. Any function with parameters would do.
head = jnp.asarray(rng.normal(size=(FEATURES, DIM)) / np.sqrt(FEATURES), jnp.float32)


def points_of(head, features):
    """Embeds features [..., 64] as points of the ball [..., 16]."""
    return ball.embed(features @ head)


# 4. The loss: each image should be nearest to the other images of its class. Its batch is
# [classes, images of each class, dim]; the smaller the temperature, the more near misses weigh.
def loss_of(head, batch):
    """Pairwise cross-entropy of Hyp-ViT."""
    return pairwise_cross_entropy(points_of(head, batch), space=ball, temperature=0.2)


# 5. The test: each image of an unseen class searches all others. Scores are exact.
def recall(head):
    """Recall@1 among the test classes, for each query."""
    points = points_of(head, test).reshape(-1, DIM)
    return query_scores(points, labels, metrics=["recall@1"], space=ball)["recall@1"]


# 6. Training: batches of 50 classes, gradients through the ball, Adam.
optimizer = optax.adam(3e-2)
state, step = optimizer.init(head), jax.jit(jax.value_and_grad(loss_of))
print(f"before: recall@1 {recall(head).mean():.2f}")
for number in range(STEPS):
    batch = train[rng.choice(len(train), 50, replace=False)]
    loss, gradient = step(head, batch)
    updates, state = optimizer.update(gradient, state)
    head = optax.apply_updates(head, updates)
    if number % 25 == 0:
        print(f"step {number}: loss {loss:.2f}")

# 7. The result, with its uncertainty: 95% of bootstrap samples of the queries lie in the interval.
scores = recall(head)
((low, high),) = bootstrap_intervals([scores])
print(f"after: recall@1 {scores.mean():.2f} ({low:.2f} to {high:.2f})")

# 8. A search: the five nearest images of the first two. An image finds itself, at distance 0.
points = points_of(head, test).reshape(-1, DIM)
distances, ids = nearest_neighbors(points[:2], points, k=5, space=ball)
print("classes of the nearest:", labels[ids].tolist())
