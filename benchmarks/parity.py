"""Compares this device with a CPU, and bfloat16 with float32."""

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from ml_collections import ConfigDict

from benchmarks import measure, retrieval
from benchmarks.job import scene
from benchmarks.programs import TINY, config_of
from hypjax import parallel
from hypjax.config.settings import model_settings
from hypjax.models import create_embedder
from hypjax.models.layers import compute_dtype, normalize, on_tensor_cores
from hypjax.retrieval import recall_at_k
from hypjax.system import console

COLUMNS = {
    "comparison": "{comparison}",
    "error": "{error:.2g}",
    "bound": "{bound:g}",
    "passed": "{passed}",
}
_IMAGES = 16
_POINTS, _CLASSES, _KS = 6000, 1000, (1, 10, 100)
# Bounds on 1 − cosine similarity, which is quadratic in the relative error, and on differences of
# recall, where almost equal distances may swap.
_FLOAT32, _BFLOAT16, _RECALL = 1e-5, 1e-2, 1e-3


def rows(options: measure.Options) -> Iterator[dict[str, Any]]:
    """One row per comparison: its `error`, the `bound`, and whether it `passed`."""
    for name, error, bound in itertools.chain(_compare_encoder(options.quick), _compare_recall()):
        console.say(f"{name}: {error:.2g}")
        passed = bool(error <= bound)  # False for NaN.
        yield {"comparison": name, "error": float(error), "bound": bound, "passed": passed}


def _compare_encoder(quick: bool) -> Iterator[tuple[str, float, float]]:
    """Largest 1 − cosine similarity of a random encoder's embeddings, and of its gradient."""
    config = config_of("model.precision=float32", *(TINY if quick else ()))
    rng, here, cpu = np.random.default_rng(0), jax.devices()[0], jax.devices("cpu")[0]
    images = np.stack([scene(rng, 9, config.data.image_size) for _ in range(_IMAGES)])
    with jax.default_device(cpu):
        pixels = normalize(images, config.data.mean, config.data.std)
        init = jax.jit(create_embedder(model_settings(config), device=cpu).init)
        params = init(jax.random.key(0), pixels[:1])["params"]
        directions = jax.random.normal(jax.random.key(1), (_IMAGES, config.model.head_dim))
    arrays = params, pixels, directions
    exact = _embeddings_and_gradient(config, here, *arrays)
    kernels = ("cudnn", "xla") if on_tensor_cores(compute_dtype("auto")) else ("xla",)
    for name, precision, kernel, device, bound in (
        *((f"bfloat16 by {k} and float32", "bfloat16", k, here, _BFLOAT16) for k in kernels),
        ("float32 here and on the CPU", "float32", "auto", cpu, _FLOAT32),
    ):
        config.model.precision, config.run.attention = precision, kernel
        other = _embeddings_and_gradient(config, device, *arrays)
        for quantity, x, y in zip(("embeddings", "gradient"), exact, other, strict=True):
            cosines = np.sum(x * y, -1) / np.linalg.norm(x, axis=-1) / np.linalg.norm(y, axis=-1)
            yield f"{quantity}, {name}", float(1 - cosines.min()), bound


def _embeddings_and_gradient(
    config: ConfigDict, device: jax.Device, *arrays: Any
) -> tuple[Float[np.ndarray, "images dim"], Float[np.ndarray, " parameters"]]:
    """Embeddings without their mean, and the gradient of their products with random directions."""
    model = create_embedder(model_settings(config), device=device)

    def total(params: Any, pixels: Array, directions: Array) -> tuple[Array, Array]:
        features = model.apply({"params": params}, pixels).projected
        return jnp.sum(features * directions), features

    moved = jax.device_put(arrays, device)
    options = parallel.compiler_options(parallel.create_mesh((1, 1), [device]))
    gradient = jax.jit(jax.grad(total, has_aux=True), compiler_options=options)
    gradients, features = gradient(*moved)
    flat = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(gradients)], dtype=np.float64)
    features = np.asarray(features, np.float64)
    return features - features.mean(axis=0), flat


def _compare_recall() -> Iterator[tuple[str, float, float]]:
    """Differences of Recall@K between this device and the CPU, for the same points."""
    labels = np.random.default_rng(0).integers(0, _CLASSES, _POINTS)
    for name in ("cosine", "hyperbolic"):
        points, space = retrieval.points_of(name, labels), retrieval.SPACES[name]
        here = recall_at_k(points, labels, ks=_KS, space=space)
        on_cpu = jax.device_put(points, jax.devices("cpu")[0])  # Search runs on the points' device.
        there = recall_at_k(on_cpu, labels, ks=_KS, space=space)
        difference = max(abs(here[k] - there[k]) for k in _KS)
        yield f"{name} recall here and on the CPU", difference, _RECALL
