"""Whether this device computes what a CPU computes, and how far bfloat16 is from float32."""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from ml_collections import ConfigDict

from benchmarks import measure, retrieval
from benchmarks.job import scene
from benchmarks.programs import step_config
from hypjax.errors import UserError
from hypjax.models import attention, create_embedder
from hypjax.models.layers import compute_dtype, normalize, on_tensor_cores
from hypjax.retrieval import recall_at_k
from hypjax.system import console

_IMAGES = 16
_QUERIES = (200, 8)  # Of all blocks of ViT-S/16 but the last one, and of that; padded.
_KEYS, _PADDED = 197, 200
_POINTS, _CLASSES, _KS = 6000, 1000, (1, 10, 100)
# Bounds of 1 − cosine similarity, which is quadratic in the relative error; of the
# attention's relative error; and of differences of a recall, where almost equal distances
# may swap.
_FLOAT32, _BFLOAT16, _ATTENTION, _RECALL = 1e-5, 1e-2, 0.05, 1e-3


def rows(options: measure.Options) -> measure.Rows:
    """One row per comparison: its `error`, the `bound`, and whether it `passed`."""
    rows = []
    for name, error, bound in (*_encoder(options.quick), *_attention(), *_recall()):
        console.say(f"{name}: {error:.2g}")
        passed = bool(error <= bound)  # False for NaN.
        rows.append({"comparison": name, "error": float(error), "bound": bound, "passed": passed})
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Formats a Markdown table with one row per comparison."""
    lines = []
    for row in rows:
        passed = "yes" if row["passed"] else "no"
        lines.append([row["comparison"], f"{row['error']:.2g}", f"{row['bound']:g}", passed])
    return measure.markdown(("comparison", "error", "bound", "passed"), lines)


def _encoder(quick: bool) -> Iterator[tuple[str, float, float]]:
    """1 − cosine similarity of a random encoder's embeddings, at worst, and of its gradient."""
    side = 64 if quick else 224
    config = step_config("vit" if quick else "vit_small_patch16_224", side, _IMAGES, 2)
    rng = np.random.default_rng(0)
    images = np.stack([scene(rng, (9, 9), (side, side)) for _ in range(_IMAGES)])
    here, cpu = jax.devices()[0], jax.devices("cpu")[0]
    config.model.precision = "float32"
    with jax.default_device(cpu):
        pixels = normalize(images, config.data.mean, config.data.std)
        params = create_embedder(config, device=cpu).init(jax.random.key(0), pixels[:1])["params"]
        directions = jax.random.normal(jax.random.key(1), (_IMAGES, config.model.head_dim))
    arrays = params, pixels, directions
    exact = _embeddings_and_gradient(config, here, *arrays)
    for name, precision, device, bound in (
        ("bfloat16 and float32", "bfloat16", here, _BFLOAT16),
        ("float32 here and on the CPU", "float32", cpu, _FLOAT32),
    ):
        config.model.precision = precision
        found = _embeddings_and_gradient(config, device, *arrays)
        for what, x, y in zip(("embeddings", "gradient"), exact, found, strict=True):
            cosines = np.sum(x * y, -1) / np.linalg.norm(x, axis=-1) / np.linalg.norm(y, axis=-1)
            yield f"{what}, {name}", float(1 - cosines.min()), bound


def _embeddings_and_gradient(
    config: ConfigDict, device: jax.Device, *arrays: Any
) -> tuple[Float[np.ndarray, "images dim"], Float[np.ndarray, " parameters"]]:
    """Embeddings without their mean, and the gradient of their products with random directions."""
    model = create_embedder(config, device=device)

    def total(params: Any, pixels: Array, directions: Array) -> tuple[Array, Array]:
        features = model.apply({"params": params}, pixels).projected
        return jnp.sum(features * directions), features

    moved = jax.device_put(arrays, device)
    gradients, features = jax.jit(jax.grad(total, has_aux=True))(*moved)
    flat = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(gradients)], dtype=np.float64)
    features = np.asarray(features, np.float64)
    return features - features.mean(axis=0), flat


def _attention() -> Iterator[tuple[str, float, float]]:
    """Error of bfloat16 attention or of a gradient, relative to its size, by each kernel here."""
    rng, dtype = np.random.default_rng(0), jnp.bfloat16
    kernels = ("cudnn", "xla") if on_tensor_cores(compute_dtype("auto")) else ("xla",)
    for queries, kernel in itertools.product(_QUERIES, kernels):
        shapes = [(2, tokens, 6, 64) for tokens in (queries, _PADDED, _PADDED, queries)]
        arrays = [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]
        ours = functools.partial(attention.attend, length=_KEYS, kernel=kernel)
        with jax.default_matmul_precision("highest"):
            exact = _and_gradients(_exact, *(x.astype(jnp.float32) for x in arrays))
        try:
            found = jax.jit(functools.partial(_and_gradients, ours))(*arrays)
        except UserError as error:
            console.warn(str(error))
            largest = 1e9  # JSON has no infinity.
        else:
            pairs = zip(found, exact, strict=True)
            largest = float(jnp.max(jnp.stack([_relative_error(x, y) for x, y in pairs])))
        name = f"attention of {queries} to {_KEYS} tokens by {kernel}, and float32"
        yield name, largest, _ATTENTION


def _relative_error(x: Array, exact: Array) -> Array:
    return jnp.sqrt(jnp.mean((x.astype(jnp.float32) - exact) ** 2) / jnp.mean(exact**2))


def _exact(query: Array, key: Array, value: Array) -> Array:
    return jax.nn.dot_product_attention(query, key[:, :_KEYS], value[:, :_KEYS])


def _and_gradients(attend: Callable[..., Array], *arrays: Array) -> tuple[Array, ...]:
    """Attention to queries, keys and values, and its product with weights by each of these."""
    *heads, weights = arrays
    mixed, pullback = jax.vjp(attend, *heads)
    return mixed, *pullback(weights)


def _recall() -> Iterator[tuple[str, float, float]]:
    """Differences of Recall@K between this device and the CPU, for the same points."""
    labels = np.random.default_rng(0).integers(0, _CLASSES, _POINTS)
    for name in ("cosine", "hyperbolic"):
        points, space = retrieval.points_of(name, labels), retrieval.SPACES[name]
        here = recall_at_k(points, labels, ks=_KS, space=space)
        moved = jax.device_put(points, jax.devices("cpu")[0])  # Searched where it is.
        there = recall_at_k(moved, labels, ks=_KS, space=space)
        off = max(abs(here[k] - there[k]) for k in _KS)
        yield f"{name} recall here and on the CPU", off, _RECALL
