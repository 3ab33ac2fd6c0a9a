import flax.linen as nn
import jax
import numpy as np
import optax

import hypjax
from hypjax.assemble import open_splits
from hypjax.config import load_config
from hypjax.geometry import PoincareBall
from hypjax.objectives import pairwise_cross_entropy
from hypjax.retrieval import recall_at_k
from hypjax.training.optim import create_optimizer
from hypjax.types import View

steps, classes_per_batch = 300, 64

splits = open_splits(load_config("configs/glyphs.py", ["data.validation_classes=0"]))
train, test, view = splits.train, splits.test, View(side=32, resize=32, channels=1)
letters = np.stack([train.test_view(i, view) for i in range(len(train))])
unseen = np.stack([test.test_view(i, view) for i in range(len(test))])
of_class = [np.flatnonzero(train.labels == label) for label in range(train.num_classes)]


class Net(nn.Module):
    """Maps letters [images, 32, 32, 1] to [images, 64]."""

    @nn.compact
    def __call__(self, pixels):
        """Embeds normalised pixels."""
        for width in (32, 64, 128):
            pixels = nn.relu(nn.Conv(width, (3, 3), strides=2)(pixels))
        return nn.Dense(64)(pixels.reshape(len(pixels), -1))


net, ball = Net(), PoincareBall(c=0.1, clip_radius=2.3)
params = net.init(jax.random.key(0), letters[:1] / 255)["params"]
optimizer = create_optimizer(1e-3)


@jax.jit
def embed(params, pixels):
    """Embeds pixels, uint8, in the ball."""
    return ball.embed(net.apply({"params": params}, (pixels / 255 - 0.5) / 0.5))


@jax.jit
def train_step(params, state, pixels, labels):
    """Updates the parameters by one batch."""

    def loss_of(params):
        balanced = {"labels": labels, "samples_per_class": 2}
        points = embed(params, pixels)
        return pairwise_cross_entropy(points, space=ball, temperature=0.2, **balanced)

    loss, gradient = jax.value_and_grad(loss_of)(params)
    updates, state = optimizer.update(gradient, state, params)
    return optax.apply_updates(params, updates), state, loss


state, random = optimizer.init(params), np.random.default_rng(0)
for _ in range(steps):
    classes = random.choice(len(of_class), classes_per_batch, replace=False)
    batch = np.concatenate([random.choice(of_class[label], 2, replace=False) for label in classes])
    params, state, loss = train_step(params, state, letters[batch], train.labels[batch])
print(recall_at_k(embed(params, unseen), test.labels, ks=(1, 10), space=ball))

hypjax.save(params, ball, "runs/loop", encoder=net, image_size=32, channels=1)
model = hypjax.load("runs/loop", encoder=net)
hits = model.search(list(unseen), unseen[0], k=5)[0]
print(hits)
