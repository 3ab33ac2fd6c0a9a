"""Models: encoders, and the head on top of them."""

from hypjax.models.embedder import Embedder, create_embedder
from hypjax.models.vit import VisionTransformer

__all__ = ["Embedder", "VisionTransformer", "create_embedder"]
