"""Models: encoders, and the head on top of them."""

from hypjax.models.embedder import Embedder, compute_dtype, create_embedder
from hypjax.models.vit import VisionTransformer

__all__ = ["Embedder", "VisionTransformer", "compute_dtype", "create_embedder"]
