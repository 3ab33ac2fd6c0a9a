"""Models: encoders and the embedding head."""

from hypjax.models.architectures import ARCHITECTURES, create_encoder
from hypjax.models.embedder import Embedder, create_embedder, example_images, model_shapes
from hypjax.models.layers import compute_dtype
from hypjax.models.resnet import ResNet
from hypjax.models.vit import VisionTransformer

__all__ = [
    "ARCHITECTURES",
    "Embedder",
    "ResNet",
    "VisionTransformer",
    "compute_dtype",
    "create_embedder",
    "create_encoder",
    "example_images",
    "model_shapes",
]
