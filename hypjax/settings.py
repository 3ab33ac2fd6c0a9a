"""Settings of a run, read once from its configuration: typed values for the code below."""

import dataclasses
from collections.abc import Mapping

from hypjax.types import View


@dataclasses.dataclass(frozen=True)
class Pixels:
    """How images become a model's input."""

    view: View
    mean: tuple[float, ...]  # Of each channel, for pixels from 0 to 1.
    std: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Start:
    """The weights with which a model starts."""

    weights: str | None  # A name on the hub, a file or a run; None for random weights.
    load_head: bool = False  # Whether the head starts from them, too.
    head_init: str = "orthogonal"  # Or "pca", the principal components of the training images.


@dataclasses.dataclass(frozen=True)
class EncoderSettings:
    """An encoder and how it is computed."""

    architecture: str  # timm's name, "features", a user's name, or `UNSIZED`'s.
    view: View
    pooling: str = "cls"
    precision: str = "auto"  # Of products, see `hypjax.models.layers.compute_dtype`.
    patch_size: int = 0  # Only of `UNSIZED` architectures, like the other sizes.
    width: int = 0  # Also the dimension of "features".
    depth: int = 0
    num_heads: int = 0
    mlp_ratio: float = 4.0
    pool_first: bool | None = None  # Whether pooling precedes a Transformer's norm; None: as timm.
    gem_exponent: float = 3.0
    learn_gem: bool = False
    remat: bool = False  # Whether the backward pass recomputes activations.
    attention: str = "auto"  # Kernel of attention on NVIDIA GPUs.
    norm_eps: float | None = None  # ε of a Transformer's LayerNorms; None: the architecture's.
    activation: str | None = None  # Of a Transformer's perceptrons; None: the architecture's.
    residual: str = "float32"  # Dtype of tokens between blocks; "products": that of products.


@dataclasses.dataclass(frozen=True)
class TextSettings:
    """An encoder of texts, and how it is computed; the defaults are CLIP's."""

    width: int
    depth: int
    num_heads: int
    vocabulary: int = 49_408  # Number of tokens.
    context: int = 77  # Most tokens of a text, with those of its beginning and end.
    activation: str = "gelu"  # Or "quick_gelu" or "gelu_tanh".
    norm_eps: float = 1e-5
    mlp_ratio: float = 4.0
    # "clip": tokens attend to those before them, and the end token is the text's embedding.
    # "siglip": all attend to all, and the last of `context` tokens is the embedding.
    kind: str = "clip"
    precision: str = "auto"  # Of products, see `hypjax.models.layers.compute_dtype`.
    remat: bool = False  # Whether the backward pass recomputes activations.
    attention: str = "auto"  # Kernel of attention on NVIDIA GPUs.
    residual: str = "float32"  # Dtype of tokens between blocks; "products": that of products.


@dataclasses.dataclass(frozen=True)
class ModelSettings:
    """An encoder and its head: the tower of images, or a tower beside it."""

    encoder: EncoderSettings | TextSettings
    head: str  # Kind of the head, see `hypjax.models.Embedder`.
    head_dim: int  # Ignored if the head is "none".
    towers: Mapping[str, "ModelSettings"] = dataclasses.field(default_factory=dict)
    max_norm: float | None = None  # That the head's outputs approach, see `Embedder`.


@dataclasses.dataclass(frozen=True)
class Step:
    """What a train step does beside the model, the objective and the optimiser."""

    seed: int  # Of parameters and of each step's random keys.
    microbatch: int = 0  # Images that a device embeds at once; 0 for all.
    drop_path: float = 0.0  # Rate of stochastic depth in the last block.
    ema_decay: float = 0.0  # Decay of the evaluated moving average; 0 for none.
    skips_nonfinite: bool = False  # Whether an update that is not finite is dropped.
    gradient_covariance: bool = False  # Whether to measure the spread of the images' gradients.
    takes_features: bool = False  # Whether batches hold cached features instead of pixels.


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Which images a batch holds."""

    name: str  # A value of `train.sampling`.
    seed: int
    batch_size: int
    samples_per_class: int
    repeats_images: bool = False  # Whether classes with few images show them several times.
    unlabelled: bool = False  # Whether each image is a class of its own.
    pairs: int = 0  # Tuples of an epoch.
    negatives: int = 0  # Of each tuple.
    pool: int = 0  # Images among which an epoch's negatives are mined.

    @property
    def tuple_size(self) -> int:
        """Images of a tuple: an anchor, a positive and the negatives."""
        return 2 + self.negatives


@dataclasses.dataclass(frozen=True)
class Schedule:
    """When training validates, saves, reports and ends."""

    total_steps: int
    head_warmup_steps: int = 0  # First steps, which train the head only.
    validate_every: int = 0  # Steps between validations; 0 for the last step only.
    patience: int = 0  # Validations without a better score that end training; 0 for any number.
    checkpoint_every: int = 100
    log_every: int = 10


@dataclasses.dataclass(frozen=True)
class Embedding:
    """How the images of an evaluation are embedded."""

    scales: tuple[float, ...]  # Sides relative to the view's, whose embeddings are averaged.
    batch_size: int
    workers: int = 0  # Processes that decode images; 0 uses threads.
    engine: str = "auto"  # What runs the encoder on a CPU, one of `catalogue.ENGINES`.


@dataclasses.dataclass(frozen=True)
class Scoring:
    """How embeddings are scored."""

    metrics: tuple[str, ...]
    ks: tuple[int, ...]
    pca: Mapping[str, int | None]  # Dimensions left by a PCA, by part of the model.
    whitens: bool = False  # Whether principal components get equal variances.
    expansion: int = 0  # Images in query expansion; 0 for none.
    expansion_alpha: float = 0.0  # Exponent of their weights.
    reranks: bool = False


@dataclasses.dataclass(frozen=True)
class Watch:
    """When steps that are not finite, or that teach nothing, are reported or end a run."""

    batch_size: int
    samples_per_class: int
    total_steps: int
    warmup_steps: int
    stops_on_collapse: bool = False
    max_skipped: int = 0  # Updates that are not finite and are dropped; one more ends the run.
