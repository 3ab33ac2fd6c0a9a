"""Losses of pairs and of proxies on the sphere, compared with pytorch-metric-learning."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from hypjax import objectives
from hypjax.benchmarks import peers
from hypjax.benchmarks.measure import Task, product_rate
from hypjax.geometry import Sphere

_PAIRS = 100, 9, 128  # Classes, samples and coordinates: Hyp-ViT's batch.
_PROXIES = 90, 2, 512  # 180 images, as in Proxy-Anchor and HIER.
_CLASSES = 98  # Of Cars-196.
_CENTRES = 10
PACKAGE = "pytorch_metric_learning"
_INSTALL = "pytorch-metric-learning (pip install pytorch-metric-learning)"


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
        objectives.triplet,
        "TripletMarginLoss",
        {"margin": 0.2},
        miner="BatchHardMiner",
        distance=_CHORD,
    ),
    "SupCon": Compared(objectives.supcon, "SupConLoss"),
    "scalable NCA": Compared(objectives.scalable_nca, "NCALoss", {"softmax_scale": 20}),
}


def tasks(quick: bool) -> Iterator[Task]:
    """Yields a task for each loss: its value and its gradient, by the proxies too."""
    rates = {dim: product_rate(dim) for *_, dim in (_PAIRS, _PROXIES)}
    rng = np.random.default_rng(0)
    for name, compared in COMPARED.items():
        classes, samples, dim = _PROXIES if compared.centres else _PAIRS
        classes = classes // 10 if quick else classes
        features = rng.normal(size=(classes * samples, dim)).astype(np.float32)
        labels = np.repeat(np.arange(classes), samples)
        ours, memory = gradient(compared, features, labels)
        others = _CLASSES * compared.centres or len(features)
        shape = f"{len(features)} images"
        if compared.centres:
            shape += f", {_CLASSES} classes"
        yield Task(
            f"{name}, {shape}, {dim} coordinates",
            ours,
            peer(compared, features, labels),
            peer_name(),
            limit=3 * 2 * len(features) * others * dim / rates[dim],
            memory=memory,
        )


def gradient(
    compared: Compared, features: np.ndarray, labels: np.ndarray
) -> tuple[Callable[[], tuple[jax.Array, Any]], int]:
    """Returns a function that computes loss and gradients, and its temporary memory in bytes."""
    space = Sphere()
    samples = int(np.sum(labels == labels[0]))

    def loss(features: jax.Array, labels: jax.Array, proxies: jax.Array | None) -> jax.Array:
        points = space.embed(features)
        if proxies is None:
            return compared.ours(points, labels, space=space, samples_per_class=samples)
        return compared.ours(points, labels, space.embed(proxies), space=space)

    proxies = _proxies(compared, features.shape[1])
    program = jax.jit(jax.value_and_grad(loss, argnums=(0,) if proxies is None else (0, 2)))
    arguments = jax.device_put((features, labels, proxies))
    compiled = program.lower(*arguments).compile()
    memory = compiled.memory_analysis().temp_size_in_bytes
    return lambda: jax.block_until_ready(compiled(*arguments)), memory


def _proxies(compared: Compared, dim: int) -> np.ndarray | None:
    if not compared.centres:
        return None
    shape = (_CLASSES, dim) if compared.centres == 1 else (_CLASSES, compared.centres, dim)
    return np.random.default_rng(1).normal(size=shape).astype(np.float32)


def peer_name() -> str:
    """Returns the name of the peer, or what to install."""
    if not peers.installed("torch", PACKAGE):
        return _INSTALL
    import pytorch_metric_learning

    from hypjax.benchmarks import torch_peers

    if torch_peers.device() is None:
        return "torch for this device"
    return f"{torch_peers.name()}, pytorch-metric-learning {pytorch_metric_learning.__version__}"


def peer(
    compared: Compared, features: np.ndarray, labels: np.ndarray
) -> Callable[[], tuple[Any, Any]] | None:
    """Returns a function that computes their loss and its gradients, or None without the package.

    Its gradients are those by the features, and by the proxies in the shape of ours.
    """
    if not peers.installed("torch", PACKAGE):
        return None
    import torch
    from pytorch_metric_learning import distances, losses, miners

    from hypjax.benchmarks import torch_peers

    device = torch_peers.device()
    if device is None:
        return None
    kind, settings = compared.distance
    distance = getattr(distances, kind)(**settings)
    proxies = _proxies(compared, features.shape[1])
    sizes = () if proxies is None else (_CLASSES, features.shape[1])
    loss = getattr(losses, compared.theirs)(*sizes, distance=distance, **compared.arguments)
    loss = loss.to(device)
    miner = compared.miner and getattr(miners, compared.miner)(distance=distance)
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
