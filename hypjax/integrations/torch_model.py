"""A trained model in PyTorch: timm's encoder, the head, and the map into the space."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import timm
import torch
from jaxtyping import PyTree
from torch import Tensor, nn
from torch.nn import functional

from hypjax.errors import UserError
from hypjax.experiment.embedding import part_of, prefix_of
from hypjax.geometry import Space
from hypjax.inference.model import Model
from hypjax.models import Embedder
from hypjax.models.custom import CustomEncoder
from hypjax.models.embedder import at_side, scaled_side
from hypjax.models.layers import rmac_regions
from hypjax.models.pretrained import pools_as_timm, timm_model, timm_state_dict
from hypjax.system.files import contiguous

_SMALLEST_NORM = 1e-30


class TorchModel(nn.Module):
    """A copy of a trained model, which maps resized and cropped images to points.

    Takes uint8 [batch, side, side, channels] or, if the model was trained on features, float32
    [batch, dim]; returns float32 [batch, dim].
    """

    mean: Tensor
    std: Tensor

    def __init__(self, embedder: Model) -> None:
        super().__init__()
        method, model, params = embedder.method, embedder.module, embedder.params
        self.space = embedder.space
        self.prefix = prefix_of(embedder.part)
        scales = method.embedding.scales if embedder.takes_pixels else ()
        sides = [scaled_side(model.encoder, scale) for scale in scales]
        self.encoders = nn.ModuleList(TimmEncoder(model, params, side) for side in sides)
        if len(sides) > 1 and not self.space.squared:
            raise UserError(f"the mean over eval.scales is iterative in {self.space}; unset it")
        self.register_buffer("mean", torch.tensor(method.pixels.mean))
        self.register_buffer("std", torch.tensor(method.pixels.std))
        self.has_norm = model.head_kind == "norm_dense"
        self.head = self.projection = None
        if part_of(embedder.part) == "head" and model.head_kind != "none":
            kernel = params["head"]["kernel"]
            self.head = _dense(kernel, params["head"].get("bias", np.zeros(kernel.shape[1])))
        if (pca := embedder.projection) is not None:
            factors = np.sqrt(np.mean(pca.variances) / pca.variances) if pca.whiten else 1.0
            kernel = pca.components.T * factors
            self.projection = _dense(kernel, -pca.mean @ kernel)

    def forward(self, images: Tensor) -> Tensor:
        """Maps images, or features, to points."""
        if not self.encoders:
            return self._points(images)
        pixels = (images.to(torch.float32) / 255 - self.mean) / self.std
        pixels = pixels.permute(0, 3, 1, 2)
        points = [self._points(encoder(pixels)) for encoder in self.encoders]
        return points[0] if len(points) == 1 else embed(self.space, torch.stack(points).mean(0))

    def _points(self, features: Tensor) -> Tensor:
        if self.head is not None:
            if self.has_norm:
                features = functional.layer_norm(features, features.shape[-1:])
            features = self.head(features)
        features = features[:, : self.prefix]
        if self.projection is not None:
            features = self.projection(shorten(self.space, features))
        return embed(self.space, features)


class TimmEncoder(nn.Module):
    """The timm model of an encoder, with its weights and pooling; resizes images to `side`."""

    def __init__(self, model: Embedder, params: PyTree, side: int) -> None:
        super().__init__()
        if isinstance(model.encoder, CustomEncoder):
            raise UserError("timm has no model of a custom encoder; try the package jax2onnx")
        self.new_side = None if side == model.encoder.image_size else side
        if self.new_side:
            model, params = at_side(model, params, side)
        encoder = model.encoder
        self.model: Any
        name, settings = timm_model(params, model)
        settings["num_classes"] = 0
        if name:
            self.model = timm.create_model(name, **settings)
        else:
            self.model = timm.models.VisionTransformer(**settings)
        state = timm_state_dict(params["encoder"], encoder)
        # Not strict: counts of updates are missing, and have no effect here.
        self.model.load_state_dict({k: torch.tensor(v) for k, v in state.items()}, strict=False)
        self.gem_exponent = float(params["encoder"].get("gem_exponent", encoder.gem_exponent))
        self.pooling = "" if pools_as_timm(encoder) else encoder.pooling
        self.num_prefix_tokens = encoder.num_prefix_tokens

    def forward(self, images: Tensor) -> Tensor:
        """Embeds normalised pixels [batch, channels, height, width]."""
        if self.new_side:
            images = functional.interpolate(images, [self.new_side] * 2, mode="bilinear")
        if not self.pooling:
            return self.model(images)
        tokens = self.model.forward_features(images)
        if tokens.ndim == 4:  # A feature map. timm's pooling of a single position does nothing.
            pooled = self._pool(tokens.flatten(2).transpose(1, 2))
            return self.model.forward_head(pooled[..., None, None], pre_logits=True)
        if self.pooling == "cls":
            return self.model.fc_norm(tokens[:, 0])
        return self.model.fc_norm(self._pool(tokens[:, self.num_prefix_tokens :]))

    def _pool(self, patches: Tensor) -> Tensor:
        if self.pooling == "gem":
            exponent = self.gem_exponent
            return patches.clamp(min=1e-6).pow(exponent).mean(1).pow(1 / exponent)
        return _POOLINGS[self.pooling](patches)


def _rmac(patches: Tensor) -> Tensor:
    side = math.isqrt(patches.shape[1])
    grid = patches.unflatten(1, (side, side))
    maxima = [grid[:, y : y + n, x : x + n].amax((1, 2)) for y, x, n in rmac_regions(side)]
    return functional.normalize(torch.stack(maxima), dim=-1, eps=1e-6).sum(0)


_POOLINGS: dict[str, Callable[[Tensor], Tensor]] = {  # As in `hypjax.models.layers`.
    "avg": lambda patches: patches.mean(1),
    "max": lambda patches: patches.amax(1),
    "avg_max": lambda patches: patches.mean(1) + patches.amax(1),
    "rmac": _rmac,
}


def _dense(kernel: np.ndarray, bias: np.ndarray) -> nn.Linear:
    layer = nn.Linear(*np.shape(kernel))
    layer.weight.data = torch.tensor(contiguous(np.asarray(kernel, np.float32).T))
    layer.bias.data = torch.tensor(contiguous(np.asarray(bias, np.float32)))
    return layer


def shorten(space: Space, features: Tensor) -> Tensor:
    """Shortens features as the space does: `space.features(space.embed(features))`."""
    directions, feature_norms, _ = _directions_and_norms(space, features)
    return directions * feature_norms


def embed(space: Space, features: Tensor) -> Tensor:
    """Maps features to points of a space, as `space.embed` does."""
    directions, _, norms_by_part = _directions_and_norms(space, features)
    return torch.cat([directions * point_norms for point_norms in norms_by_part], dim=-1)


def _directions_and_norms(space: Space, features: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Unit directions of features, norms of shortened features, and norms of points by part."""
    norms = features.norm(dim=-1, keepdim=True).clamp(min=_SMALLEST_NORM)
    radii = space.radii(norms, torch)
    if radii is None:
        raise UserError(f"{space} has no `radii`, which an export to PyTorch needs")
    feature_norms, norms_by_part = radii
    return features / norms, feature_norms, norms_by_part
