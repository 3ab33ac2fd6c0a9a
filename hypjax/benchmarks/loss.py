"""Losses and their gradients, compared with PyTorch.

The hyperbolic loss is compared with the published formula and with that of hypjax; losses of pairs
and of proxies on the sphere, and IRT's with a memory of all training images, with
pytorch-metric-learning.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from hypjax import objectives
from hypjax.benchmarks import measure, peers
from hypjax.benchmarks.measure import Task, compiled_gradient, product_rate, table  # noqa: F401
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
_PML = "pytorch_metric_learning"
_INSTALL = "pytorch-metric-learning (pip install pytorch-metric-learning)"
# Of SOP: images of a batch, coordinates, and rows and classes of the memory.
_IMAGES, _MEMORY_DIM, _ROWS, _SOP_CLASSES = 64, 384, 60_000, 11_318
_BATCHES = 8  # Which follow each other.


def rows(options: measure.Options) -> measure.Rows:
    """Measures batches of 900 points, or of 90 if quick; then other losses."""
    return measure.measure(_tasks(options.quick), options.repeats)


def _tasks(quick: bool) -> Iterator[Task]:
    rates = {dim: product_rate(dim) for dim in (_DIM, _PROXIES[2], _MEMORY_DIM)}
    for classes, samples in _SHAPES:
        classes = classes // 10 if quick else classes
        rng = np.random.default_rng(0)
        features = rng.normal(size=(classes * samples, _DIM)).astype(np.float32)
        ours, memory = gradient(features, samples)
        what = f"loss and gradient, {classes} classes × {samples}, {_DIM} coordinates"
        limit = _product_seconds(len(features), len(features), _DIM, rates)
        for name, run in _torch_losses(features, samples):
            yield Task(what, ours, run, name, limit, memory=memory)
    rng = np.random.default_rng(0)
    for name, compared in COMPARED.items():
        classes, samples, dim = _PROXIES if compared.centres else _PAIRS
        classes = classes // 10 if quick else classes
        features = rng.normal(size=(classes * samples, dim)).astype(np.float32)
        labels = np.repeat(np.arange(classes), samples)
        ours, memory = compared.gradient(features, labels)
        shape = f"{len(features)} images" + f", {_CLASSES} classes" * bool(compared.centres)
        others = _CLASSES * compared.centres or len(features)
        limit = _product_seconds(len(features), others, dim, rates)
        peer = compared.peer(features, labels)
        what = f"{name}, {shape}, {dim} coordinates"
        yield Task(what, ours, peer, _peer_name(), limit, memory=memory)
    data = make_data(_ROWS // 10 if quick else _ROWS)
    ours, memory = memory_step(data)
    yield Task(
        f"contrastive, {_IMAGES} images, a memory of {len(data.points)} × {_MEMORY_DIM}",
        ours,
        memory_peer(data),
        _peer_name(),
        _product_seconds(_IMAGES, len(data.points), _MEMORY_DIM, rates, products=2),
        memory=memory,
    )


def _product_seconds(n: int, m: int, dim: int, rates: dict[int, float], products: int = 3) -> float:
    """Least seconds of the matrix products: one forward, and two backward (or one)."""
    return products * 2 * n * m * dim / rates[dim]


def gradient(
    features: np.ndarray, samples: int
) -> tuple[Callable[[], tuple[jax.Array, tuple[jax.Array]]], int]:
    """Returns what computes the hyperbolic loss and its gradient, and temporary bytes."""

    def loss(features: jax.Array) -> jax.Array:
        points = BALL.embed(features).reshape(-1, samples, features.shape[-1])
        temperature = _OBJECTIVE.temperature
        return objectives.pairwise_cross_entropy(points, space=BALL, temperature=temperature)

    return compiled_gradient(loss, features)


def _torch_losses(features: np.ndarray, samples: int) -> Iterator[tuple[str, Callable | None]]:
    """Yields the name of each PyTorch version and its function, or what to install and None."""
    if missing := peers.missing_torch("torch (pip install torch)"):
        yield missing, None
        return
    import torch

    from hypjax.benchmarks import torch_peers

    torch.set_float32_matmul_precision("highest")
    for name, loss in (
        ("Möbius sums [n, m, dim]", torch_peers.loss_by_pairs),
        ("our formula", torch_peers.loss_by_product),
        ("our formula, torch.compile", torch_peers.compiled(torch_peers.loss_by_product)),
    ):
        run = torch_peers.loss_and_gradient(loss, features, samples)
        yield f"{torch_peers.name()}, {name}", run


def _peer_name() -> str:
    """Name of the peer, or what to install."""
    if missing := peers.missing_torch(_INSTALL, _PML):
        return missing
    import pytorch_metric_learning

    from hypjax.benchmarks import torch_peers

    return f"{torch_peers.name()}, pytorch-metric-learning {pytorch_metric_learning.__version__}"


class Compared(NamedTuple):
    """A loss, and the same in pytorch-metric-learning.

    Attributes:
        ours: The loss.
        theirs: Name of their loss.
        arguments: Its arguments, other than the number of classes, the dimension and the distance.
        miner: Name of their miner, or None.
        distance: Name of their distance, and its arguments.
        centres: Proxies of each class; 0 for a loss of pairs.
    """

    ours: Callable[..., jax.Array]
    theirs: str
    arguments: dict[str, Any] = {}
    miner: str | None = None
    distance: tuple[str, dict[str, Any]] = ("CosineSimilarity", {})
    centres: int = 0

    def gradient(
        self, features: np.ndarray, labels: np.ndarray
    ) -> tuple[Callable[[], tuple[jax.Array, Any]], int]:
        """Returns what computes loss and gradients, by the proxies too, and temporary bytes."""
        space, proxies = Sphere(), self._proxies(features.shape[1])
        samples = int(np.sum(labels == labels[0]))

        def loss(features: jax.Array, labels: jax.Array, proxies: jax.Array | None) -> jax.Array:
            points = space.embed(features)
            if proxies is None:
                return self.ours(points, labels, space=space, samples_per_class=samples)
            return self.ours(points, labels, space.embed(proxies), space=space)

        by = (0,) if proxies is None else (0, 2)
        return compiled_gradient(loss, features, labels, proxies, by=by)

    def _proxies(self, dim: int) -> np.ndarray | None:
        shape = (_CLASSES, dim) if self.centres == 1 else (_CLASSES, self.centres, dim)
        rng = np.random.default_rng(1)
        return rng.normal(size=shape).astype(np.float32) if self.centres else None

    def peer(
        self, features: np.ndarray, labels: np.ndarray
    ) -> Callable[[], tuple[Any, Any]] | None:
        """Returns what computes their loss and its gradients, or None without the package.

        Its gradients are those by the features, and by the proxies in the shape of ours.
        """
        if peers.missing_torch(_INSTALL, _PML):
            return None
        import torch
        from pytorch_metric_learning import distances, losses, miners

        from hypjax.benchmarks import torch_peers

        device, (kind, settings) = torch_peers.device(), self.distance
        distance = getattr(distances, kind)(**settings)
        proxies = self._proxies(features.shape[1])
        sizes = () if proxies is None else (_CLASSES, features.shape[1])
        loss = getattr(losses, self.theirs)(*sizes, distance=distance, **self.arguments)
        loss = loss.to(device)
        miner = self.miner and getattr(miners, self.miner)(distance=distance)
        held = list(loss.parameters())
        for parameter in held:
            flat = torch.tensor(proxies.reshape(-1, proxies.shape[-1]), device=device)
            parameter.data = flat if flat.shape == parameter.shape else flat.T.contiguous()
        x = torch.tensor(features, device=device, requires_grad=True)
        y = torch.tensor(labels, device=device)

        def run() -> tuple[Any, Any]:
            for variable in (x, *held):
                variable.grad = None
            value = loss(x, y, miner(x, y) if miner else None)
            value.backward()
            torch_peers.synchronize()
            slopes = [p.grad if p.shape[1] == x.shape[1] else p.grad.T for p in held]
            return value.detach(), (x.grad, *(s.reshape(proxies.shape) for s in slopes))

        return run


_CHORD = "LpDistance", {"normalize_embeddings": True, "power": 2}
COMPARED = {
    "Proxy-Anchor": Compared(objectives.proxy_anchor, "ProxyAnchorLoss", centres=1),
    "Proxy-NCA": Compared(objectives.proxy_nca, "ProxyNCALoss", distance=_CHORD, centres=1),
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
        objectives.triplet, "TripletMarginLoss", {"margin": 0.2}, "BatchHardMiner", _CHORD
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


def memory_step(data: Data) -> tuple[Callable[[], tuple[jax.Array, Any]], int]:
    """Returns a function that takes one batch after the other, and its temporary memory in bytes.

    It returns value and gradient. As in training, the state is overwritten by the next one.
    """
    rows, dim = data.points.shape
    objective = objectives.PairObjective(
        Sphere(), objectives.contrastive, samples_per_class=None, memory=float(rows)
    )
    spec = objectives.Spec(_SOP_CLASSES, 2, dim, dim, rows, _IMAGES)
    params, state = objective.init(jax.random.key(0), spec)
    held = state["memory"]._replace(
        points=jnp.asarray(data.points), labels=jnp.asarray(data.remembered)
    )

    @functools.partial(jax.jit, donate_argnums=0)
    def program(state: Any, features: jax.Array, labels: jax.Array) -> tuple[Any, Any]:
        def loss(features: jax.Array) -> tuple[jax.Array, Any]:
            outputs, batch = Outputs(features, features), Batch(None, labels, None, None)
            return objective.loss(params, state, outputs, None, batch, jax.random.key(0))

        (value, (after, _)), slope = jax.value_and_grad(loss, has_aux=True)(features)
        return after, (value, slope)

    batches = jax.device_put(list(zip(data.features, data.labels, strict=True)))
    kept = {"state": {"memory": held}, "next": 0}
    compiled = program.lower(kept["state"], *batches[0]).compile()

    def run() -> tuple[jax.Array, Any]:
        batch = batches[kept["next"] % len(batches)]
        kept["state"], found = compiled(kept["state"], *batch)
        kept["next"] += 1
        return jax.block_until_ready(found)

    return run, compiled.memory_analysis().temp_size_in_bytes


def memory_peer(data: Data) -> Callable[[], Any] | None:
    """Returns a function that does the same with their memory, or None without the package."""
    if peers.missing_torch(_INSTALL, _PML):
        return None
    import torch
    from pytorch_metric_learning import distances, losses, reducers

    from hypjax.benchmarks import torch_peers

    class Sum(reducers.MeanReducer):
        """All losses count, not only those above 0."""

        def element_reduction(self, losses: torch.Tensor, *_: Any) -> torch.Tensor:
            return losses.sum() / _IMAGES

    device, cosine = torch_peers.device(), distances.CosineSimilarity()
    alone, remembered = (
        losses.ContrastiveLoss(1, 0.5, distance=cosine, reducer=Sum()) for _ in range(2)
    )
    memory = losses.CrossBatchMemory(remembered, _MEMORY_DIM, len(data.points)).to(device)
    memory.embedding_memory.copy_(torch.tensor(data.points))
    memory.label_memory.copy_(torch.tensor(data.remembered))
    memory.has_been_filled = True
    x = torch.tensor(data.features, device=device, requires_grad=True)
    y, taken = torch.tensor(data.labels, device=device).long(), {"next": 0}

    def run() -> Any:
        i = taken["next"] % len(x)
        taken["next"], x.grad = taken["next"] + 1, None
        points = torch.nn.functional.normalize(x[i], dim=-1)
        value = alone(points, y[i]) + memory(points, y[i])
        value.backward()
        torch_peers.synchronize()
        return value.detach(), x.grad[i]

    return run
