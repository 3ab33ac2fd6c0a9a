import flax.linen as nn
import jax.numpy as jnp

import hypjax
from hypjax.config import read_config


class Net(nn.Module):
    """Maps normalised pixels [images, height, width, channels] to [images, width]."""

    width: int = 64

    @nn.compact
    def __call__(self, pixels):
        x = nn.relu(nn.Conv(self.width, (3, 3), strides=2)(pixels))
        return nn.Dense(self.width)(x.mean(axis=(1, 2)))


def attraction(embeddings, labels, *, space, margin=1.0):
    """Mean distance within classes, less that between classes up to a margin."""
    distances = space.distance_matrix(embeddings, embeddings)
    same = labels[:, None] == labels
    near = jnp.mean(distances, where=same)
    far = jnp.mean(jnp.minimum(distances, margin), where=~same)
    return near - far, {"near": near, "far": far}  # The loss, and curves to log.


config = read_config("configs/folder.py:hyp-scratch")
config.data.image_size = config.data.resize = 32
hypjax.train_and_evaluate(
    config, "runs/own", dataset=(images, labels), encoder=Net(), objective=attraction
)
