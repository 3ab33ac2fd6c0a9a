"""Losses and their gradients, compared with PyTorch.

The hyperbolic loss is compared with the published formula and with that of hypjax; losses of pairs
and of proxies on the sphere, and IRT's with a memory of all training images, with
pytorch-metric-learning.
"""

import functools
import importlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from benchmarks import peers
from benchmarks.measure import Options, Task, product_seconds
from hypjax import objectives
from hypjax.config import default_config
from hypjax.geometry import PoincareBall, Sphere
from hypjax.types import Batch, Outputs

_OBJECTIVE = default_config().objective
BALL = PoincareBall(_OBJECTIVE.c, _OBJECTIVE.clip_radius)
_DIM = 128
_SHAPES = ((450, 2), (100, 9))  # Classes and samples: Hyp-ViT's batches.
_PAIRS = 100, 9, 128  # Classes, samples and coordinates: Hyp-ViT's batch.
_PROXIES = 90, 2, 512  # 180 images, as in Proxy-Anchor and HIER.
_CLASSES = 98  # Of Cars-196.
_CENTRES = 10
# Of SOP: images of a batch, coordinates, and rows and classes of the memory.
_IMAGES, _MEMORY_DIM, _ROWS, _SOP_CLASSES = 64, 384, 60_000, 11_318
_BATCHES = 8  # Which follow each other.
Features = Float[np.ndarray, "n d"]
Labels = Int[np.ndarray, " n"]
# A function that returns value and gradients of a loss, and the temporary bytes that it needs.
Gradient = tuple[Callable[[], tuple[jax.Array, Any]], int]


def tasks(options: Options) -> Iterator[Task]:
    """Batches of 900 points, or of 90 if quick; then other losses, and one with a memory."""
    smaller = 10 if options.quick else 1
    for classes, samples in _SHAPES:
        classes //= smaller
        features = _features(np.random.default_rng(0), classes * samples, _DIM)
        ours, memory = gradient(features, samples)
        what = f"loss and gradient, {classes} classes × {samples}, {_DIM} coordinates"
        limit = 3 * product_seconds(len(features), len(features), _DIM)
        module, name = peers.torch_or_missing("torch (pip install torch)")
        theirs = module.hyperbolic_losses(features, samples) if module else {None: None}
        for formula, peer in theirs.items():
            peer_name = f"{name}, {formula}" if peer else name
            yield Task(what, ours, peer, peer_name, limit, memory=memory)
    rng = np.random.default_rng(0)
    module, peer_name = _metric_learning()
    for name, compared in COMPARED.items():
        classes, samples, dim = _PROXIES if compared.centres else _PAIRS
        classes //= smaller
        features = _features(rng, classes * samples, dim)
        labels = np.repeat(np.arange(classes), samples)
        ours, memory = compared.gradient(features, labels)
        shape = f"{len(features)} images" + f", {_CLASSES} classes" * bool(compared.centres)
        others = _CLASSES * compared.centres or len(features)
        # One product forward, and two backward.
        limit = 3 * product_seconds(len(features), others, dim)
        peer = module and module.metric_loss(compared, features, labels)
        what = f"{name}, {shape}, {dim} coordinates"
        yield Task(what, ours, peer, peer_name, limit, memory=memory)
    data = make_data(_ROWS // smaller)
    ours, memory = memory_step(data)
    what = f"contrastive, {_IMAGES} images, a memory of {len(data.points)} × {_MEMORY_DIM}"
    # The memory has no gradient.
    limit = 2 * product_seconds(_IMAGES, len(data.points), _MEMORY_DIM)
    peer = module and module.contrastive_with_memory(data)
    yield Task(what, ours, peer, peer_name, limit, memory=memory)


def _features(rng: np.random.Generator, count: int, dim: int) -> Features:
    return rng.normal(size=(count, dim)).astype(np.float32)


def _metric_learning() -> tuple[Any, str]:
    """The module of peers and pytorch-metric-learning's name; or None and what to install."""
    package = "pytorch-metric-learning"
    install, imported = f"{package} (pip install {package})", package.replace("-", "_")
    module, name = peers.torch_or_missing(install, imported)
    if module:
        name += f", {package} {importlib.import_module(imported).__version__}"
    return module, name


def _compiled_gradient(
    loss: Callable[..., jax.Array], *arguments: Any, by: tuple[int, ...] = (0,)
) -> Gradient:
    arguments = jax.device_put(arguments)
    program = jax.jit(jax.value_and_grad(loss, argnums=by)).lower(*arguments).compile()
    memory = program.memory_analysis().temp_size_in_bytes
    return lambda: jax.block_until_ready(program(*arguments)), memory


def gradient(features: Features, samples: int) -> Gradient:
    """The hyperbolic loss with its gradient."""

    def loss(features: jax.Array) -> jax.Array:
        points = BALL.embed(features).reshape(-1, samples, features.shape[-1])
        temperature = _OBJECTIVE.temperature
        return objectives.pairwise_cross_entropy(points, space=BALL, temperature=temperature)

    return _compiled_gradient(loss, features)


class Compared(NamedTuple):
    """A loss, and the name, arguments and miner of the same in pytorch-metric-learning."""

    ours: Callable[..., jax.Array]
    theirs: str
    arguments: dict[str, Any] = {}  # Besides the number of classes, the dimension and the distance.
    miner: str | None = None
    chord: bool = False  # Whether their distance is the squared chord; otherwise it is the cosine.
    centres: int = 0  # Proxies of each class; 0 for a loss of pairs.

    def gradient(self, features: Features, labels: Labels) -> Gradient:
        """Our loss with its gradients, by the proxies too."""
        space, proxies = Sphere(), self.proxies(features.shape[1])
        samples = int(np.sum(labels == labels[0]))

        def loss(features: jax.Array, labels: jax.Array, proxies: jax.Array | None) -> jax.Array:
            points = space.embed(features)
            if proxies is None:
                return self.ours(points, labels, space=space, samples_per_class=samples)
            return self.ours(points, labels, space.embed(proxies), space=space)

        by = (0,) if proxies is None else (0, 2)
        return _compiled_gradient(loss, features, labels, proxies, by=by)

    def proxies(self, dim: int) -> Float[np.ndarray, "*b d"] | None:
        """Random proxies of all classes, or None for a loss of pairs."""
        if not self.centres:
            return None
        shape = (_CLASSES, dim) if self.centres == 1 else (_CLASSES, self.centres, dim)
        return np.random.default_rng(1).normal(size=shape).astype(np.float32)


COMPARED = {
    "Proxy-Anchor": Compared(objectives.proxy_anchor, "ProxyAnchorLoss", centres=1),
    "Proxy-NCA": Compared(objectives.proxy_nca, "ProxyNCALoss", chord=True, centres=1),
    "normalised softmax": Compared(
        objectives.normalized_softmax, "NormalizedSoftmaxLoss", centres=1
    ),
    "SoftTriple": Compared(  # Theirs has no regularisation.
        functools.partial(objectives.soft_triple, regularization=0),
        "SoftTripleLoss",
        {"centers_per_class": _CENTRES},
        centres=_CENTRES,
    ),
    "multi-similarity": Compared(
        objectives.multi_similarity, "MultiSimilarityLoss", miner="MultiSimilarityMiner"
    ),
    "contrastive": Compared(  # Theirs is divided by the number of pairs that count.
        objectives.contrastive, "ContrastiveLoss", {"pos_margin": 1, "neg_margin": 0.5}
    ),
    "triplet, hard": Compared(
        objectives.triplet, "TripletMarginLoss", {"margin": 0.2}, "BatchHardMiner", chord=True
    ),
    "SupCon": Compared(objectives.supcon, "SupConLoss"),
    "scalable NCA": Compared(objectives.scalable_nca, "NCALoss", {"softmax_scale": 20}),
}


class Data(NamedTuple):
    """Features and labels of batches that follow each other, and points and labels of a memory."""

    features: Float[np.ndarray, "batches n dim"]
    labels: Int[np.ndarray, "batches n"]
    points: Float[np.ndarray, "rows dim"]
    remembered: Int[np.ndarray, " rows"]


def make_data(rows: int) -> Data:
    """Features of which about one in a hundred pairs of different classes is above the margin."""
    rng, dim = np.random.default_rng(0), _MEMORY_DIM

    def features(*shape: int) -> np.ndarray:
        noise = rng.normal(size=(*shape, dim)) / np.sqrt(dim)
        return (np.sqrt(0.75 / dim) + noise).astype(np.float32)

    pairs = rng.integers(0, _SOP_CLASSES, (_BATCHES, _IMAGES // 2))
    points = features(rows)
    return Data(
        features(_BATCHES, _IMAGES),
        np.repeat(pairs, 2, axis=1).astype(np.int32),
        points / np.linalg.norm(points, axis=1, keepdims=True),
        rng.integers(0, _SOP_CLASSES, rows).astype(np.int32),
    )


def memory_step(data: Data) -> Gradient:
    """A contrastive loss with a memory, for one batch after the other.

    As in training, each batch overwrites the state that the one before has left.
    """
    rows, dim = data.points.shape
    objective = objectives.PairObjective(
        Sphere(), objectives.contrastive, samples_per_class=None, memory=float(rows)
    )
    spec = objectives.Spec(_SOP_CLASSES, 2, dim, dim, rows, _IMAGES)
    params, state = objective.init(jax.random.key(0), spec)
    compute = objectives.loss_function(objective)
    points, labels = jnp.asarray(data.points), jnp.asarray(data.remembered)
    state = {"memory": state["memory"]._replace(points=points, labels=labels)}

    @functools.partial(jax.jit, donate_argnums=0)
    def program(state: Any, features: jax.Array, labels: jax.Array) -> tuple[Any, Any]:
        def loss(features: jax.Array) -> tuple[jax.Array, Any]:
            outputs, batch = Outputs(features, features), Batch(None, labels, None, None)
            return compute(params, state, outputs, None, batch, jax.random.key(0))

        (value, (after, _)), slope = jax.value_and_grad(loss, has_aux=True)(features)
        return after, (value, slope)

    batches = jax.device_put(list(zip(data.features, data.labels, strict=True)))
    compiled, following = program.lower(state, *batches[0]).compile(), itertools.cycle(batches)

    def run() -> tuple[jax.Array, Any]:
        nonlocal state
        state, found = compiled(state, *next(following))
        return jax.block_until_ready(found)

    return run, compiled.memory_analysis().temp_size_in_bytes
