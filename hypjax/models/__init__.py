"""Models: encoders and the embedding head."""

from hypjax.models.architectures import ARCHITECTURES as ARCHITECTURES
from hypjax.models.architectures import create_encoder as create_encoder
from hypjax.models.convnext import ConvNeXt as ConvNeXt
from hypjax.models.custom import register_encoder as register_encoder
from hypjax.models.efficientnet import EfficientNetLite as EfficientNetLite
from hypjax.models.embedder import Embedder as Embedder
from hypjax.models.embedder import create_embedder as create_embedder
from hypjax.models.embedder import model_shapes as model_shapes
from hypjax.models.layers import compute_dtype as compute_dtype
from hypjax.models.resnet import ResNet as ResNet
from hypjax.models.text import TextTransformer as TextTransformer
from hypjax.models.vit import VisionTransformer as VisionTransformer
