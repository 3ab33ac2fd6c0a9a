"""The same tasks in PyTorch, with its fastest settings that compute the same."""

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from hypjax.benchmarks import peers

warnings.filterwarnings(
    "ignore", module="torch"
)  # torch.compile warns about code of PyTorch itself.


def device() -> Any:
    """PyTorch's device of the same kind as JAX's, or None if there is none."""
    import torch

    if jax.default_backend() == "cpu":
        return torch.device("cpu")
    if jax.default_backend() == "gpu" and torch.cuda.is_available():
        return torch.device("cuda")
    return None


def name() -> str:
    """Name of PyTorch with its version and device."""
    import torch

    place = device()
    kind = torch.cuda.get_device_name(place) if place.type == "cuda" else "CPU"
    return f"torch {torch.__version__} on {kind}"


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function for the shapes of its first call, and discards earlier programs."""
    import torch

    torch.compiler.reset()
    return torch.compile(function, dynamic=False)


def synchronize() -> None:
    """Waits until the accelerator has finished all queued work."""
    import torch

    if device().type == "cuda":
        torch.cuda.synchronize()


def in_ball(features: Any, c: float, radius: float) -> Any:
    """Clips feature norms and maps features into the ball (Hyp-ViT, Eqs. 3 and 6)."""
    import torch

    norms = features.norm(dim=-1, keepdim=True).clamp_min(1e-12)
    clipped = features * (radius / norms).clamp(max=1)
    lengths = clipped.norm(dim=-1, keepdim=True).clamp_min(1e-12)
    return torch.tanh(math.sqrt(c) * lengths) * clipped / (math.sqrt(c) * lengths)


def distances_by_addition(x: Any, y: Any, c: float) -> Any:
    """Computes Eq. 2 as published, from the Möbius sums of all pairs: an array [n, m, dim]."""
    import torch

    product = -(x @ y.T)[..., None]
    x, y = -x[:, None], y[None]
    x2, y2 = (x * x).sum(dim=-1, keepdim=True), (y * y).sum(dim=-1, keepdim=True)
    added = (1 + 2 * c * product + c * y2) * x + (1 - c * x2) * y
    norms = (added / (1 + 2 * c * product + c**2 * x2 * y2)).norm(dim=-1)
    return 2 / math.sqrt(c) * torch.atanh((math.sqrt(c) * norms).clamp(max=1 - 1e-5))


def distances_by_product(x: Any, y: Any, c: float) -> Any:
    """Computes the same distances with one matrix product, as hypjax does."""
    import torch

    x2, y2 = (x * x).sum(dim=-1), (y * y).sum(dim=-1)
    squares = (x2[:, None] + y2 - 2 * x @ y.T).clamp_min(1e-12)
    factors = (1 - c * x2)[:, None] * (1 - c * y2)
    return 2 / math.sqrt(c) * torch.asinh((c * squares / factors).sqrt())


def loss_by_pairs(features: Any, samples: int, ball: dict[str, float], temperature: float) -> Any:
    """Computes Eq. 5 with separate distances, by addition, for each pair of subsets."""
    import torch

    points = in_ball(features, **ball).reshape(-1, samples, features.shape[-1])
    classes = len(points)
    targets = torch.arange(classes, device=features.device)
    itself = torch.eye(classes, device=features.device, dtype=torch.bool)
    total = 0
    for i in range(samples):
        for j in range(samples):
            if i == j:
                continue
            within = -distances_by_addition(points[:, i], points[:, i], ball["c"]) / temperature
            across = -distances_by_addition(points[:, i], points[:, j], ball["c"]) / temperature
            logits = torch.cat([across, within.masked_fill(itself, -torch.inf)], dim=1)
            total = total + torch.nn.functional.cross_entropy(logits, targets)
    return total


def loss_by_product(features: Any, samples: int, ball: dict[str, float], temperature: float) -> Any:
    """Computes Eq. 5 as hypjax does, with one distance matrix for all pairs of subsets."""
    import torch

    points = in_ball(features, **ball)
    logits = -distances_by_product(points, points, ball["c"]) / temperature
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


def loss_and_gradient(
    loss: Callable[..., Any],
    features: np.ndarray,
    samples: int,
    ball: dict[str, float],
    temperature: float,
) -> Callable[[], tuple[Any, Any]]:
    """Returns a function that computes a loss and its gradient with respect to the features."""
    import torch

    x = torch.tensor(features, device=device(), requires_grad=True)

    def run() -> tuple[Any, Any]:
        x.grad = None
        value = loss(x, samples, ball, temperature)
        value.backward()
        synchronize()
        return value.detach(), x.grad

    return run


@dataclasses.dataclass
class TorchTrainer:
    """timm's encoder with a head, trained with fused AdamW on `loss_by_product`.

    Attributes:
        config: Configuration of a run.
        compiled: Whether to use torch.compile.
    """

    config: ConfigDict
    compiled: bool

    def __post_init__(self) -> None:
        """Creates the model, the optimiser and a batch of noise."""
        import torch

        config, place = self.config, device()
        model = config.model
        if model.architecture == "vit":
            sizes = dict(patch_size=model.patch_size, embed_dim=model.width, depth=model.depth)
            sizes |= dict(img_size=config.data.image_size, num_heads=model.num_heads)
            encoder = peers.timm().models.VisionTransformer(num_classes=0, **sizes)
            width = model.width
        else:
            encoder = peers.timm().create_model(model.architecture, num_classes=0)
            width = encoder.num_features
        encoder.patch_embed.proj.requires_grad_("patch_projection" not in config.optim.frozen)
        self._encoder = encoder.to(place)
        self._head = torch.nn.Linear(width, model.head_dim).to(place)
        both = [*self._encoder.parameters(), *self._head.parameters()]
        self._trained = [p for p in both if p.requires_grad]
        optim = config.optim
        self._optimizer = torch.optim.AdamW(
            self._trained,
            lr=1e-6,
            betas=(optim.b1, optim.b2),
            weight_decay=optim.weight_decay,
            fused=True,
        )
        side, size = config.data.image_size, config.train.batch_size
        images = torch.randint(0, 256, (size, 3, side, side), dtype=torch.uint8)
        self._images = images.to(place)
        self._flips = (torch.rand(size) < 0.5).to(place)
        objective = config.objective
        ball = {"c": objective.c, "radius": objective.clip_radius}
        samples, temperature = config.train.samples_per_class, objective.temperature
        self._loss = functools.partial(
            loss_by_product, samples=samples, ball=ball, temperature=temperature
        )
        mean, std = (torch.tensor(x, device=place) for x in (config.data.mean, config.data.std))
        self._mean, self._std = mean[:, None, None], std[:, None, None]
        transform = compiled if self.compiled else lambda function: function
        self._forward, self._embed = transform(self._compute), transform(self._features)

    @property
    def name(self) -> str:
        """Name for the table."""
        mode = "torch.compile" if self.compiled else "eager"
        precision = "bf16 autocast" if self._autocast else "float32"
        settings = f"fused attention, fused AdamW, {precision}"
        return f"{name()} + timm {peers.timm().__version__}, {mode}, {settings}"

    @property
    def _autocast(self) -> bool:
        return self.config.model.precision == "bfloat16"

    def _features(self, pixels: Any, flips: Any = None) -> Any:
        import torch

        images = pixels
        if flips is not None:
            pixels = torch.where(flips[:, None, None, None], images.flip(-1), images)
        pixels = (pixels.float() / 255 - self._mean) / self._std
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self._autocast):
            pooled = self._encoder(pixels)
        return self._head(pooled.float())

    def _compute(self, images: Any, flips: Any) -> Any:
        return self._loss(self._features(images, flips))

    def train(self, count: int) -> None:
        """Runs the given number of steps."""
        import torch

        for _ in range(count):
            self._optimizer.zero_grad(set_to_none=True)
            self._forward(self._images, self._flips).backward()
            torch.nn.utils.clip_grad_norm_(self._trained, self.config.optim.clip_norm)
            self._optimizer.step()
        synchronize()

    def embed(self, count: int) -> None:
        """Embeds the batch the given number of times, as evaluation does."""
        import torch

        self._encoder.eval()
        with torch.inference_mode():
            for _ in range(count):
                self._embed(self._images)
        self._encoder.train()
        synchronize()
