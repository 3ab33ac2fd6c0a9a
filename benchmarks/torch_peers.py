"""The same tasks in PyTorch, with its fastest settings that give the same results.

Losses use the default configuration's ball and temperature.
"""

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
from ml_collections import ConfigDict

from hypjax import objectives
from hypjax.config import default_config

# torch.compile warns about code of PyTorch itself.
warnings.filterwarnings("ignore", module="torch")

# A function that computes a loss and its gradients by some variables.
Gradients = Callable[[], tuple[torch.Tensor, list[torch.Tensor]]]
_OBJECTIVE = default_config().objective
_C, _TEMPERATURE = _OBJECTIVE.c, _OBJECTIVE.temperature


def device() -> torch.device:
    """PyTorch's device of the same kind as JAX's."""
    return torch.device("cpu" if jax.default_backend() == "cpu" else "cuda")


def name() -> str:
    """Name of PyTorch with its version and device."""
    kind = torch.cuda.get_device_name(device()) if device().type == "cuda" else "CPU"
    return f"torch {torch.__version__} on {kind}"


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function for the shapes of its first call, and discards earlier programs."""
    torch.compiler.reset()
    return torch.compile(function, dynamic=False)


def synchronize() -> None:
    """Waits until the accelerator has finished all queued work."""
    if device().type == "cuda":
        torch.cuda.synchronize()


def value_and_gradients(loss: Callable[[], torch.Tensor], *variables: torch.Tensor) -> Gradients:
    """Returns a function that computes a loss and its gradients by these variables."""

    def run() -> tuple[torch.Tensor, list[torch.Tensor]]:
        for variable in variables:
            variable.grad = None
        value = loss()
        value.backward()
        synchronize()
        return value.detach(), [variable.grad for variable in variables]

    return run


def in_ball(features: torch.Tensor) -> torch.Tensor:
    """Clips feature norms and maps features into the ball (Hyp-ViT, Eqs. 3 and 6)."""
    norms = features.norm(dim=-1, keepdim=True).clamp_min(1e-12)
    clipped = features * (_OBJECTIVE.clip_radius / norms).clamp(max=1)
    lengths = clipped.norm(dim=-1, keepdim=True).clamp_min(1e-12)
    return torch.tanh(math.sqrt(_C) * lengths) * clipped / (math.sqrt(_C) * lengths)


def distances_by_addition(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Computes Eq. 2 as published, from the Möbius sums of all pairs: an array [n, m, dim]."""
    product = -(x @ y.T)[..., None]
    x, y = -x[:, None], y[None]
    x2, y2 = (x * x).sum(dim=-1, keepdims=True), (y * y).sum(dim=-1, keepdims=True)
    added = (1 + 2 * _C * product + _C * y2) * x + (1 - _C * x2) * y
    norms = (added / (1 + 2 * _C * product + _C**2 * x2 * y2)).norm(dim=-1)
    return 2 / math.sqrt(_C) * torch.atanh((math.sqrt(_C) * norms).clamp(max=1 - 1e-5))


def distances_by_product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Computes the same distances with one matrix product, as hypjax does."""
    x2, y2 = (x * x).sum(dim=-1), (y * y).sum(dim=-1)
    squares = (x2[:, None] + y2 - 2 * x @ y.T).clamp_min(1e-12)
    factors = (1 - _C * x2)[:, None] * (1 - _C * y2)
    return 2 / math.sqrt(_C) * torch.asinh((_C * squares / factors).sqrt())


def loss_by_pairs(features: torch.Tensor, samples: int) -> torch.Tensor:
    """Computes Eq. 5 with separate distances, by addition, for each pair of subsets."""
    points = in_ball(features).reshape(-1, samples, features.shape[-1])
    classes = len(points)
    targets = torch.arange(classes, device=features.device)
    itself = torch.eye(classes, device=features.device, dtype=torch.bool)
    total = 0
    for i in range(samples):
        for j in set(range(samples)) - {i}:
            within = -distances_by_addition(points[:, i], points[:, i]) / _TEMPERATURE
            across = -distances_by_addition(points[:, i], points[:, j]) / _TEMPERATURE
            logits = torch.cat([across, within.masked_fill(itself, -torch.inf)], dim=1)
            total = total + torch.nn.functional.cross_entropy(logits, targets)
    return total


def loss_by_product(features: torch.Tensor, samples: int) -> torch.Tensor:
    """Computes Eq. 5 as hypjax does, with one distance matrix for all pairs of subsets."""
    points = in_ball(features)
    logits = -distances_by_product(points, points) / _TEMPERATURE
    classes = len(points) // samples
    blocks = logits.reshape(classes, samples, classes, samples).permute(1, 3, 0, 2)
    itself = torch.eye(classes, device=features.device, dtype=torch.bool)
    same_subset = torch.eye(samples, device=features.device, dtype=torch.bool)
    masked = blocks.masked_fill(same_subset[:, :, None, None] & itself, -torch.inf)
    candidates = masked.logsumexp(dim=-1)
    positives = blocks.diagonal(dim1=-2, dim2=-1)
    negatives = candidates.diagonal(dim1=0, dim2=1).T[:, None]
    losses = (torch.logaddexp(candidates, negatives) - positives).mean(dim=-1)
    return losses.masked_fill(same_subset, 0).sum()


def hyperbolic_losses(features: np.ndarray, samples: int) -> dict[str, Gradients]:
    """Value and gradient of the hyperbolic loss, as published and as in hypjax."""
    torch.set_float32_matmul_precision("highest")
    x = torch.tensor(features, device=device(), requires_grad=True)
    losses = {
        "Möbius sums [n, m, dim]": loss_by_pairs,
        "our formula": loss_by_product,
        "our formula, torch.compile": compiled(loss_by_product),
    }
    return {
        name: value_and_gradients(lambda loss=loss: loss(x, samples), x)
        for name, loss in losses.items()
    }


class Compared(NamedTuple):
    """A loss of hypjax on the sphere, and the same loss and miner of pytorch-metric-learning."""

    ours: Callable[..., jax.Array]
    theirs: torch.nn.Module
    miner: torch.nn.Module | None = None

    @property
    def proxies(self) -> list[np.ndarray]:
        """The loss's proxies, if any, in hypjax's shape."""
        return [
            _in_our_shape(parameter.data).cpu().numpy() for parameter in self.theirs.parameters()
        ]

    def gradient(self, features: np.ndarray, labels: np.ndarray) -> Gradients:
        """Value and gradients by features and proxies; the proxies' in hypjax's shape."""
        x = torch.tensor(features, device=device(), requires_grad=True)
        y, loss, miner = torch.tensor(labels, device=device()), self.theirs.to(device()), self.miner
        compute = value_and_gradients(
            lambda: loss(x, y, miner(x, y) if miner else None), x, *loss.parameters()
        )

        def run() -> tuple[torch.Tensor, list[torch.Tensor]]:
            value, (by_features, *by_proxies) = compute()
            return value, [by_features, *map(_in_our_shape, by_proxies)]

        return run


def _in_our_shape(proxies: torch.Tensor) -> torch.Tensor:
    """Proxies as rows, [classes, dim] or [classes, proxies, dim]; some losses have columns."""
    rows = proxies if len(proxies) % _CLASSES == 0 else proxies.T
    return rows.reshape(_CLASSES, -1, rows.shape[1]).squeeze(1)


_CLASSES = 98  # Of Cars-196.


def metric_losses(dim: int) -> dict[str, Compared]:
    """Pair losses, and losses with proxies [dim] of 98 classes, by name."""
    from pytorch_metric_learning import distances, losses, miners

    cosine, chord = distances.CosineSimilarity(), distances.LpDistance(power=2)
    sizes = _CLASSES, dim
    soft_triple = functools.partial(objectives.soft_triple, regularization=0)
    return {
        "Proxy-Anchor": Compared(objectives.proxy_anchor, losses.ProxyAnchorLoss(*sizes)),
        "Proxy-NCA": Compared(objectives.proxy_nca, losses.ProxyNCALoss(*sizes)),
        "normalised softmax": Compared(
            objectives.normalized_softmax, losses.NormalizedSoftmaxLoss(*sizes)
        ),
        "SoftTriple": Compared(soft_triple, losses.SoftTripleLoss(*sizes)),
        "multi-similarity": Compared(
            objectives.multi_similarity, losses.MultiSimilarityLoss(), miners.MultiSimilarityMiner()
        ),
        # pytorch-metric-learning divides by the number of pairs with a loss.
        "contrastive": Compared(
            objectives.contrastive, losses.ContrastiveLoss(1, 0.5, distance=cosine)
        ),
        "triplet, hard": Compared(
            objectives.triplet,
            losses.TripletMarginLoss(0.2, distance=chord),
            miners.BatchHardMiner(distance=chord),
        ),
        "SupCon": Compared(objectives.supcon, losses.SupConLoss()),
        "scalable NCA": Compared(objectives.scalable_nca, losses.NCALoss(20, distance=cosine)),
    }


class TorchTrainer:
    """timm's encoder with a head, trained with fused AdamW on `loss_by_product`."""

    def __init__(self, config: ConfigDict, compile: bool) -> None:
        import timm

        self._config, place, model, optim = config, device(), config.model, config.optim
        if model.architecture == "vit":
            sizes = dict(patch_size=model.patch_size, embed_dim=model.width, depth=model.depth)
            sizes |= dict(img_size=config.data.image_size, num_heads=model.num_heads)
            encoder = timm.models.VisionTransformer(num_classes=0, **sizes)
        else:
            encoder = timm.create_model(model.architecture, num_classes=0)
        encoder.patch_embed.proj.requires_grad_("patch_projection" not in optim.frozen)
        self._encoder = encoder.to(place)
        self._head = torch.nn.Linear(encoder.num_features, model.head_dim).to(place)
        parameters = [*self._encoder.parameters(), *self._head.parameters()]
        self._trained = [parameter for parameter in parameters if parameter.requires_grad]
        settings = dict(betas=(optim.b1, optim.b2), weight_decay=optim.weight_decay)
        self._optimizer = torch.optim.AdamW(self._trained, lr=1e-6, fused=True, **settings)
        side, size = config.data.image_size, config.train.batch_size
        images = torch.randint(0, 256, (size, 3, side, side), dtype=torch.uint8)
        self._images = images.to(place)
        self._flips = (torch.rand(size) < 0.5).to(place)
        mean, std = (torch.tensor(x, device=place) for x in (config.data.mean, config.data.std))
        self._mean, self._std = mean[:, None, None], std[:, None, None]
        self._autocast = model.precision == "bfloat16"
        transform = compiled if compile else lambda function: function
        self._forward, self._embed = transform(self._loss), transform(self._features)
        mode = "torch.compile" if compile else "eager"
        dtype = "bf16 autocast" if self._autocast else "float32"
        self.name = f"{name()} + timm {timm.__version__}, {mode}, fused attention, fused AdamW, "
        self.name += dtype

    def _features(self, pixels: torch.Tensor, flips: torch.Tensor | None = None) -> torch.Tensor:
        if flips is not None:
            pixels = torch.where(flips[:, None, None, None], pixels.flip(-1), pixels)
        pixels = (pixels.float() / 255 - self._mean) / self._std
        with torch.autocast(pixels.device.type, torch.bfloat16, enabled=self._autocast):
            pooled = self._encoder(pixels)
        return self._head(pooled.float())

    def _loss(self, images: torch.Tensor, flips: torch.Tensor) -> torch.Tensor:
        features = self._features(images, flips)
        return loss_by_product(features, self._config.train.samples_per_class)

    def train(self, count: int) -> None:
        """Runs `count` steps."""
        for _ in range(count):
            self._optimizer.zero_grad(set_to_none=True)
            self._forward(self._images, self._flips).backward()
            torch.nn.utils.clip_grad_norm_(self._trained, self._config.optim.clip_norm)
            self._optimizer.step()
        synchronize()

    def embed(self, count: int) -> None:
        """Embeds the batch `count` times, as evaluation does."""
        self._encoder.eval()
        with torch.inference_mode():
            for _ in range(count):
                self._embed(self._images)
        self._encoder.train()
        synchronize()
