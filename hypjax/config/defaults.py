"""The fields of a configuration, and their defaults: the published recipe of Hyp-ViT.

Files in `configs/` start from `default_config` and say what differs.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def default_config() -> ConfigDict:
    """Returns the defaults: Hyp-ViT's recipe (Ermolov et al., CVPR 2022, Section 4 and code).

    Where the recipe depends on the dataset, the comment tells whose value stands here.
    """
    config = ConfigDict()
    config.name = ""  # The configuration file's, set when it is loaded, and
    config.variant = ""  # its variant's; together they name the default workdir.
    config.seed = 0

    config.data = data = ConfigDict()
    data.name = "glyphs"  # or folder: own images, at
    data.path = placeholder(str)  # a folder of classes, or a .csv or .parquet table.
    # How files become pixels: exact, or fast, which takes JPEGs no larger than a view needs.
    data.decoder = "exact"
    # Length to which longer shorter sides are scaled, once, where run.cache is device; None: none.
    data.stored_side = placeholder(int)
    data.channels = 3
    data.image_size = 224
    data.resize = 224  # Shorter side before the test view's centre crop; CUB: 256.
    data.mean = (0.5, 0.5, 0.5)  # Pixel scaling of ViT; DeiT and DINO use ImageNet's.
    data.std = (0.5, 0.5, 0.5)
    data.crop_area = (0.2, 1.0)  # RandomResizedCrop
    data.crop_ratio = (3 / 4, 4 / 3)
    data.flip = 0.5
    # Classes held out, as a number, or below 1 as a share of them:
    data.validation_classes = 0.0  # of the training classes, to choose by;
    # of all, to report, where own images say nothing of splits, or a partial copy has no test.
    data.test_classes = 0.0
    data.split_seed = 0  # Which classes these are; it does not vary with a run's seed.

    config.model = model = ConfigDict()
    model.architecture = "vit_small_patch16_224"  # timm's name, or vit: a Transformer with these
    model.patch_size = 0  # sizes, which are 0 elsewhere.
    model.width = 0
    model.depth = 0
    model.num_heads = 0
    # Of the encoder: a timm hub id, a file, or a run's folder or URL.
    model.weights = placeholder(str)
    # Of tokens, in training and in evaluation: cls, cls_dist_mean, avg, max, avg_max or gem.
    model.pooling = "cls"
    model.eval_pooling = "cls"
    model.head_dim = 128
    # Of the encoder's products: float32, bfloat16, or auto, which is bfloat16 on accelerators.
    model.precision = "auto"

    config.objective = objective = ConfigDict()
    objective.name = "pairwise_cross_entropy"
    objective.space = "poincare"
    objective.c = 0.1
    objective.clip_radius = placeholder(float)  # None: features are not clipped.
    objective.clip_radius = 2.3
    objective.temperature = 0.2

    config.optim = optim = ConfigDict()
    optim.learning_rate = 3e-5  # vit, deit; dino: 1e-5
    optim.schedule = "constant"
    optim.warmup_steps = 0
    optim.weight_decay = 0.01
    optim.b1 = 0.9
    optim.b2 = 0.999
    optim.eps = 1e-8
    optim.clip_norm = 3.0
    optim.frozen = ("patch_projection",)  # Names of parameter groups, see hypjax/optim.py.

    config.train = train = ConfigDict()
    train.total_steps = 200  # CUB
    train.batch_size = 900  # samples_per_class images of each class
    train.samples_per_class = 2  # SOP, In-Shop; CUB, Cars: 9.
    # epoch_classes: each class at most once an epoch; drawn_classes: classes drawn anew for every
    # batch (HIER, IRT); shuffled: images, whatever their classes.
    train.sampling = "epoch_classes"
    train.repeat_images = False  # True: a class's images are drawn with replacement (HIER).
    train.on_nonfinite = "stop"  # or skip: drop the update of a step that is not finite,
    train.max_nonfinite = 10  # so often at most.

    config.eval = evaluation = ConfigDict()
    evaluation.ks = (1, 2, 4, 8)  # of Recall@K and precision@K; CUB, Cars.
    evaluation.metrics = ("recall",)  # and, where wanted, others of `METRICS`.
    evaluation.every = 0  # Steps between evaluations on the validation classes; 0: none.

    config.run = run = ConfigDict()
    run.data_dir = placeholder(str)  # None: TFDS's default, ~/tensorflow_datasets.
    run.workers = 0  # Processes that decode; 0: threads.
    run.input_timeout = 600.0  # Seconds that a step waits for a piece of its input.
    # or device: training images decoded once into the devices' memory, and cropped there; or host:
    run.cache = "none"  # all images decoded once, in a memory-mapped file
    run.cache_dir = placeholder(str)  # in this folder. None: ~/.cache/hypjax/decoded.
    # Copies of the parameters, and parts that each is cut into; images are shared out over all.
    run.mesh = (-1, 1)  # −1: as many as there are devices for.
    run.microbatch = 0  # Most images embedded at once, the same gradient in less memory; 0: all.
    run.remat = False  # True: each block's activations are computed again for its gradient.
    run.eval_batch_size = 256
    run.log_every = 10  # Steps between lines of metrics.jsonl.
    run.checkpoint_every = 100  # Steps between checkpoints.
    run.wandb_project = placeholder(str)  # None: nothing is sent to Weights & Biases.
    return config.lock()
