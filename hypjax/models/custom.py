"""User-defined encoders: Flax modules from pixels to vectors, registered under a name."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hypjax.errors import UserError, explained, require_free
from hypjax.models import architectures
from hypjax.models.encoder import FEATURES, Encoder
from hypjax.models.layers import Images
from hypjax.models.vit import VisionTransformer
from hypjax.types import View

CUSTOM_ENCODERS: dict[str, nn.Module] = {}  # By their names in configurations.
# Fields of both `VisionTransformer` and `config.model`.
SIZES = ("patch_size", "width", "depth", "num_heads")


def register_encoder(name: str, module: nn.Module) -> None:
    """Registers a user-defined encoder as a value of `model.architecture`, in this process.

    The module is an `Encoder`, or a Flax module that maps normalised pixels [images, height, width,
    channels] to [images, dim] and has no variables except parameters. A later registration of a
    name replaces an earlier one. Raises a `UserError` for a name that hypjax uses.
    """
    taken = FEATURES, *architectures.UNSIZED, *architectures.ARCHITECTURES
    require_free("an architecture", name, taken)
    if not isinstance(module, nn.Module):
        raise UserError(f"{module!r} is not a Flax module; pass an instance of flax.linen.Module")
    CUSTOM_ENCODERS[name] = module.clone(name=None, parent=None)


class CustomEncoder(Encoder):
    """Wraps a user's module as an encoder; its weights are named by path."""

    module: nn.Module
    dim: int
    image_size: int
    pooling: str = "own"
    classifiers = ("head",)
    poolings = ("own",)

    def setup(self) -> None:
        """Puts the module's parameters at the top of the tree, without the wrapper's level."""
        nn.share_scope(self, self.module)

    @property
    def layers(self) -> list[list[str]]:
        """Raises a `UserError`: a wrapped module does not define its layers."""
        raise UserError(
            "your encoder has no layers: set optim.layer_decay=1, and optim.frozen=encoder to cache"
        )

    def __call__(self, images: Images) -> Float[Array, "batch dim"]:
        """Embeds normalised pixels."""
        return self.module(images)


def custom_encoder(name: str, view: View) -> Encoder:
    """Builds a registered encoder for images of a view."""
    module = CUSTOM_ENCODERS[name]
    if isinstance(module, Encoder):
        return module.clone(image_size=view.side)
    images = jax.ShapeDtypeStruct((2, view.side, view.side, view.channels), jnp.float32)
    title = f"the encoder {name.removeprefix('own:')}"
    with explained(f"{title} cannot embed images {images.shape}"):
        output, variables = jax.eval_shape(module.init_with_output, jax.random.key(0), images)
    if set(variables) - {"params"} or getattr(output, "ndim", 0) != 2 or len(output) != 2:
        raise UserError(
            f"{title} must map images of shape {images.shape} to [2, dim] by parameters only; it "
            f"has {', '.join(variables)}, and returns {jax.tree.map(lambda x: x.shape, output)}"
        )
    return CustomEncoder(module, output.shape[1], view.side)


def is_custom(encoder: Encoder) -> bool:
    """Whether an encoder is a user's code, which may change without a change of its name."""
    return isinstance(encoder, CustomEncoder) or not type(encoder).__module__.startswith("hypjax.")


def known_fields(encoder: nn.Module) -> dict[str, Any] | None:
    """Fields of `config.model` from which hypjax builds this encoder; None if it cannot."""
    if not isinstance(encoder, Encoder):
        return None
    fields = {"pool_first": architectures.pool_first_field(encoder)}
    if name := architectures.timm_name(encoder):  # The name implies the sizes.
        return {"architecture": name, **fields, **dict.fromkeys(SIZES, 0)}
    if type(encoder) is VisionTransformer and architectures.is_in_timm(encoder):
        sizes = {size: getattr(encoder, size) for size in SIZES}
        return {"architecture": "vit", **fields, **sizes}
    return None
