"""Every field of a configuration with its default: the published recipe of Hyp-ViT.

Files in `configs/` start from `default_config` and set what differs. `docs/configuration.md` has
the values of each field. Comments name the dataset whose value is the default, if the recipe
differs between datasets.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import FieldReference, placeholder

from hypjax.config.choices import PARTS
from hypjax.errors import UserError
from hypjax.objectives import OBJECTIVES

HYP_VIT = "pairwise_cross_entropy"  # Its objective.
_optional = FieldReference  # A default in whose place None is valid, too.


def default_config(objective: str = HYP_VIT) -> ConfigDict:
    """Returns the defaults: the recipe of Ermolov et al., CVPR 2022 (Section 4 and code)."""
    config = ConfigDict()
    config.name = ""  # Name of the configuration file; set when it is loaded.
    config.variant = ""  # Name of the file's variant. Both name the default workdir.
    config.seed = 0  # Seed of the initial parameters, batches and crops.
    config.data = _data()
    config.model = _model()
    config.objective = _objective(objective)
    config.optim = _optim()
    config.train = _train()
    config.eval = _eval()
    config.run = _run()
    return config.lock()


def _data() -> ConfigDict:
    """Images, how they are decoded and cropped, and how their classes are split."""
    data = ConfigDict()
    # A name from `choices.DATASETS`; 'folder' stands for your own images, and 'features' for the
    # embeddings of another model.
    data.name = "glyphs"
    data.path = placeholder(str)  # Folder or table of your own images, or a file of features.
    data.labels = placeholder(str)  # File with the classes of features, if theirs has none.
    data.decoder = "exact"  # Or 'fast': decodes large JPEGs at a reduced size.
    data.stored_side = placeholder(int)  # Largest shorter side in the device cache, in pixels.
    data.channels = 3  # 1 for greyscale, 3 for RGB.
    data.image_size = 224  # Side of the square images that the model receives, in pixels.
    # RandomResizedCrop; or 'resize_crop', a random window of the image squashed to a square (IRT).
    data.train_view = "area_crop"
    # The centre of the resized image; or 'squash', the whole image squashed to a square (IRT).
    data.test_view = "centre_crop"
    data.resize = 224  # Shorter side, or side of the square, before the crop, in pixels; CUB: 256.
    # Mean and standard deviation of each channel, for pixels scaled to [0, 1]. ViT; DeiT and DINO
    # use those of ImageNet.
    data.mean = (0.5, 0.5, 0.5)
    data.std = (0.5, 0.5, 0.5)
    # 'area_crop': range of the crop's share of the image area, and range of its aspect ratio.
    data.crop_area = (0.2, 1.0)
    data.crop_ratio = (3 / 4, 4 / 3)
    data.flip = 0.5  # Training view: probability of a horizontal flip.
    # What is held out of your own images without splits: 'classes', so that the test shows others
    # than training did, or 'images', a quarter of those of each class. Few classes need the latter.
    data.split = "classes"
    # Training classes held out to choose the best checkpoint, and test classes, where the data has
    # no test split: their number, or, below 1, their share.
    data.validation_classes = 0.0
    data.test_classes = 0.0
    data.split_seed = 0  # Selects the held-out classes; independent of config.seed.
    return data


def _model() -> ConfigDict:
    """The encoder (images to embeddings) and the head (a linear map to fewer dimensions)."""
    model = ConfigDict()
    # timm's name, see docs/encoders.md; 'features' for given ones, of dimension `width` (None: as
    # they are); or 'vit' for a Vision Transformer of these sizes:
    model.architecture = "vit_small_patch16_224"
    model.patch_size = 0  # Side of a patch, in pixels. 0 unless the architecture is 'vit'.
    # Dimension of a token, or of features. 0 unless the architecture is 'vit' or 'features'.
    model.width = _optional(0)
    model.depth = 0  # Number of blocks. 0 unless the architecture is 'vit'.
    model.num_heads = 0  # Attention heads per block. 0 unless the architecture is 'vit'.
    # timm's name on the Hugging Face hub, a file, or the folder or URL of a run. None: random ones.
    model.weights = placeholder(str)
    model.load_head = False  # Whether the head, too, starts from model.weights, then a run.
    # How tokens become one embedding, in training and in evaluation, see `layers.poolings`.
    model.pooling = "cls"
    model.eval_pooling = "cls"
    model.head = "dense"  # A name from `choices.HEADS`.
    # Dimension of the head's embedding; without a head, the encoder's counts. None: of features.
    model.head_dim = _optional(128)
    # Before the first step: a random semi-orthogonal map, or 'pca', the principal components of the
    # training images' features, see `hypjax.training.head_init`.
    model.head_init = "orthogonal"
    model.drop_path = 0.0  # Rate of stochastic depth in a Transformer's last block.
    model.precision = "auto"  # Of the encoder's matrix products: see `layers.compute_dtype`.
    return model


def choose_objective(config: ConfigDict, name: str) -> None:
    """Names another objective, with the defaults of its own fields; the space remains."""
    old, new = config.objective, _objective(name)
    kept = {field: old[field] for field in old if field in _objective(None)}
    new.update({**kept, "name": name})
    with config.unlocked():
        config.objective = new.lock()


def _objective(name: str | None) -> ConfigDict:
    """The space of the head's embedding, and the training loss with the fields that it declares."""
    objective = ConfigDict()
    objective.name = name or ""  # A name from `hypjax.objectives.OBJECTIVES`.
    objective.space = "poincare"  # 'poincare' (the ball) or 'sphere'.
    objective.c = 0.1  # The ball has curvature -c and radius 1/sqrt(c); 0 is flat.
    # Whether c is learned, from there on; its bounds; and the factor of its learning rate.
    objective.learn_c = False
    objective.c_bounds = (0.01, 10.0)
    objective.c_rate = 1.0
    # If not empty, balls of these curvatures instead of c, whose distances are averaged.
    objective.curvatures = ()
    objective.learn = ()  # Further numbers that are learned, such as 'temperature'.
    # Norm to which features are clipped before they enter the ball. None disables clipping.
    objective.clip_radius = _optional(2.3)
    objective.feature_scale = 1.0  # On the hyperboloid: factor of features before they are clipped.
    for own, field in OBJECTIVES[name].fields.items() if name else ():
        if own in objective:
            raise UserError(
                f"objective {name} declares the field {own}, which all objectives have; rename it"
            )
        objective[own] = field.default
    return objective


def _optim() -> ConfigDict:
    """AdamW, its learning rate, and which parameters are frozen."""
    optim = ConfigDict()
    optim.learning_rate = 3e-5  # Peak learning rate. ViT and DeiT; DINO: 1e-5.
    optim.name = "adamw"  # 'adamw', or 'adam', which adds the weight decay to the gradient.
    # After the warm-up; also 'cosine' (to 0), and by decay_factor in decay_every steps 'step' (at
    # once) or 'exponential' (gradually).
    optim.schedule = "constant"
    optim.decay_every = 1000
    optim.decay_factor = 0.5
    optim.warmup_steps = _optional(0)  # Steps of linear warm-up from 0.
    optim.weight_decay = 0.01  # Applies to all trained parameters, biases included.
    optim.b1 = 0.9  # Decay rate of Adam's first moment.
    optim.b2 = 0.999  # Decay rate of Adam's second moment.
    optim.eps = 1e-8  # Adam's epsilon.
    # Largest global norm of the gradient; larger ones are rescaled. None: no such limit.
    optim.clip_norm = _optional(3.0)
    # Largest absolute value in the gradient; larger ones are clipped, before the norm (HIER).
    optim.clip_value = placeholder(float)
    # Names of `choices.GROUPS`, or paths such as 'model/encoder/block_*', of patterns.
    optim.frozen = ("patch_projection",)
    # Parameters with settings of their own, as tuples of four: what `frozen` may name; the factor
    # of their learning rate, and so of their decay; their weight decay, None for the general one;
    # and the step from which they change, while their moments accumulate from the beginning (HIER).
    # Of several paths to a parameter the longest counts, so 'encoder' leaves out
    # 'patch_projection'; of equally long ones the last.
    optim.groups = ()
    # Factor of the learning rate from each layer of the encoder to the one below it; 1: none.
    optim.layer_decay = 1.0
    return optim


def _train() -> ConfigDict:
    """Length of training and composition of batches."""
    train = ConfigDict()
    # None for one of these three, and for optim.warmup_steps, fits the user's own data.
    train.total_steps = _optional(200)  # Length of training, in batches. CUB.
    train.batch_size = _optional(900)  # Images per step: a multiple of samples_per_class.
    # Images per class in a batch. SOP and In-Shop; CUB and Cars: 9.
    train.samples_per_class = _optional(2)
    # How batches are drawn: 'epoch_classes' (every class at most once per epoch), 'drawn_classes'
    # (random classes for every batch; HIER, IRT), 'shuffled' (images regardless of class), or
    # 'tuples' (anchor, positive and mined negatives, for datasets that list pairs; IRT).
    train.sampling = "epoch_classes"
    train.tuples = ConfigDict()
    train.tuples.pairs = 2_000  # Pairs of anchor and positive, drawn for each epoch.
    train.tuples.negatives = 5  # Negatives of each, no two of one class.
    train.tuples.pool = 22_000  # Images, drawn for each epoch, of which these are the nearest.
    train.repeat_images = False  # Whether a class's images are drawn with replacement (HIER).
    # Whether the head is trained on the encoder's embeddings of the test views, computed once,
    # instead of random crops; optim.frozen must name the encoder.
    train.cached_features = False
    # LoRA: rank of the adapters of an encoder whose other parameters are frozen (0: none), the
    # numerator of their factor, and the parameters whose kernels get one, named as in optim.frozen.
    train.lora_rank = 0
    train.lora_alpha = 16.0
    train.lora_targets = ("model/encoder/*block*",)
    train.probe_steps = 0  # First steps, in which the encoder does not change.
    train.ema_decay = 0.0  # Of the moving average of the model that is evaluated; 0: none.
    train.on_nonfinite = "stop"  # Or 'skip' an update whose loss or gradient is not finite.
    # Or 'stop' if all embeddings are in one place, or recall within the batches is at chance.
    train.on_collapse = "warn"
    train.max_nonfinite = 10  # With 'skip': most updates that may be skipped before the run stops.
    return train


def _eval() -> ConfigDict:
    """What is measured, and how often."""
    evaluation = ConfigDict()
    evaluation.ks = (1, 2, 4, 8)  # The K of Recall@K and precision@K. CUB and Cars.
    evaluation.metrics = ("recall",)  # Names from `choices.METRICS`.
    # Spaces in which the parts of the model are compared; further ones than the first give scores
    # of their own. 'objective' is the space in which the objective scores the head.
    evaluation.spaces = ConfigDict({"head": ("objective",), "encoder": ("sphere",)})
    # Dimensions of prefixes of the head's output that are scored besides the whole of it; those
    # that the objective trains (matryoshka+...) are scored in any case.
    evaluation.prefixes = ()
    evaluation.every = 0  # Steps between evaluations on the validation classes; 0: at the end only.
    evaluation.benchmarks = ()  # Judged datasets besides the run's own, of `choices.BENCHMARKS`.
    evaluation.distractors = False  # Whether a million (revisitop1m) join judged galleries.
    # Sides of test images that the model sees, relative to data.image_size; the embeddings at
    # several scales are averaged in their space. Multi-scale evaluations use 1, 0.7071, 0.5.
    evaluation.scales = (1.0,)
    # Dimensions to which the embeddings of each part are reduced, by PCA fitted on the training
    # images with the model that is scored (IRT: 128); None does not reduce them.
    evaluation.pca = ConfigDict()
    for part in PARTS:
        evaluation.pca[part] = placeholder(int)
    evaluation.whiten = False  # Whether principal components get equal variances.
    # Query expansion: number of nearest images whose mean with the query is searched for (0: none),
    # and the exponent of their similarities as weights (0: average).
    evaluation.expansion = 0
    evaluation.expansion_alpha = 0.0
    evaluation.rerank = False  # Whether the first 100 results are re-ranked (k-reciprocal).
    return evaluation


def _run() -> ConfigDict:
    """Where and how the run is executed; these fields may change when it is resumed."""
    run = ConfigDict()
    run.data_dir = placeholder(str)  # Folder or URL of prepared datasets. None is TFDS's default.
    run.workers = 0  # Processes that decode images; 0 uses threads.
    # Of decoded images: 'host' (all, in a memory-mapped file), or 'device' (those of training, in
    # the memory of the devices, which crop them).
    run.cache = "none"
    # Folder of the host cache, and in it of frozen encoders' features; None: those in
    # ~/.cache/hypjax.
    run.cache_dir = placeholder(str)
    # Copies of the parameters (-1: as many as the devices allow) and shards of each copy. Batches
    # are split over all devices either way.
    run.mesh = (-1, 1)
    run.microbatch = 0  # Most images embedded at once: saves memory, for the same gradient.
    # Kernel of attention on NVIDIA GPUs: 'cudnn', 'xla', or 'auto', cuDNN's where it can be used.
    run.attention = "auto"
    run.remat = False  # Whether to recompute activations for the gradient: saves memory, too.
    run.eval_batch_size = 256  # Images per batch in evaluation.
    run.log_every = 10  # Steps between lines of metrics.jsonl.
    run.checkpoint_every = 100  # Steps between checkpoints.
    run.report = True  # Whether a finished run writes report.html, see `hypjax.report`.
    run.wandb_project = placeholder(str)  # Weights & Biases project. None does not use W&B.
    return run
