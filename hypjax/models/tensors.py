"""Tables of an encoder's tensors: timm's name, the parameter's path, and the conversion of each."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from einops import rearrange


class Tensor(NamedTuple):
    """timm's name of a tensor, the path of the parameter, and the conversion in both directions."""

    timm: str
    path: tuple[str, ...]
    to_hypjax: Callable[[np.ndarray], np.ndarray] = lambda x: x
    to_timm: Callable[[np.ndarray], np.ndarray] = lambda x: x


def dense_kernel(timm: str, *path: str) -> Iterator[Tensor]:
    """The kernel of a dense layer: [inputs, outputs] here, [outputs, inputs] in timm."""
    yield Tensor(f"{timm}.weight", (*path, "kernel"), np.transpose, np.transpose)


def dense(timm: str, *path: str) -> Iterator[Tensor]:
    """Kernel and bias of a dense layer."""
    yield from dense_kernel(timm, *path)
    yield Tensor(f"{timm}.bias", (*path, "bias"))


def norm(timm: str, *path: str) -> Iterator[Tensor]:
    """Scale and bias of a normalisation."""
    yield Tensor(f"{timm}.weight", (*path, "scale"))
    yield Tensor(f"{timm}.bias", (*path, "bias"))


def batch_norm(timm: str, *path: str) -> Iterator[Tensor]:
    """Scale, bias and running statistics of a BatchNorm."""
    yield from norm(timm, *path)
    yield Tensor(f"{timm}.running_mean", (*path, "statistics", "mean"))
    yield Tensor(f"{timm}.running_var", (*path, "statistics", "variance"))


def conv(timm: str, *path: str) -> Tensor:
    """The kernel of a convolution: [h, w, inputs, outputs]; in timm [outputs, inputs, h, w]."""
    return Tensor(
        f"{timm}.weight",
        (*path, "kernel"),
        lambda x: rearrange(x, "o i h w -> h w i o"),
        lambda x: rearrange(x, "h w i o -> o i h w"),
    )


def pointwise(timm: str, *path: str) -> Tensor:
    """The kernel of a 1×1 convolution that is a dense layer here."""
    return Tensor(
        f"{timm}.weight",
        (*path, "kernel"),
        lambda x: rearrange(x, "o i 1 1 -> i o"),
        lambda x: rearrange(x, "i o -> o i 1 1"),
    )


def patches(timm: str, side: int, *path: str) -> Iterator[Tensor]:
    """Kernel and bias of a convolution of patches that is a dense layer on their values here."""
    yield Tensor(
        f"{timm}.weight",
        (*path, "kernel"),
        lambda x: rearrange(x, "o c p q -> (p q c) o"),
        lambda x: rearrange(x, "(p q c) o -> o c p q", p=side, q=side),
    )
    yield Tensor(f"{timm}.bias", (*path, "bias"))
