"""What models, objectives and training read of a configuration, as typed settings."""

from ml_collections import ConfigDict

from hypjax.config.choices import GROUPED
from hypjax.models.encoder import FEATURES
from hypjax.objectives.base import LossSettings
from hypjax.settings import (
    EncoderSettings,
    ModelSettings,
    Sampling,
    Schedule,
    TextSettings,
    Watch,
)
from hypjax.types import TEXTS, View


def model_settings(config: ConfigDict, *, evaluating: bool = False) -> ModelSettings:
    """The settings of a run's model; if `evaluating`, it pools by `model.eval_pooling`."""
    model, data, towers = config.model, config.data, {}
    encoder = EncoderSettings(
        architecture=model.architecture,
        view=View(data.image_size, data.resize, data.channels, data.test_view),
        pooling=model.eval_pooling if evaluating else model.pooling,
        precision=model.precision,
        residual=model.residual,
        patch_size=model.patch_size,
        width=model.width,
        depth=model.depth,
        num_heads=model.num_heads,
        mlp_ratio=model.mlp_ratio,
        pool_first=model.pool_first,
        gem_exponent=model.gem_exponent,
        learn_gem=model.learn_gem,
        remat=config.run.remat,
        attention=config.run.attention,
        norm_eps=model.norm_eps,
        activation=model.activation,
    )
    if model.text.width:
        towers[TEXTS] = ModelSettings(
            _text_encoder(config), model.text.head, model.head_dim, max_norm=model.text.max_norm
        )
    return ModelSettings(encoder, model.head, model.head_dim, towers)


def _text_encoder(config: ConfigDict) -> EncoderSettings | TextSettings:
    text, data = config.model.text, config.data
    if text.kind == FEATURES:
        view = View(data.image_size, data.resize, data.channels)
        return EncoderSettings(FEATURES, view, width=text.width)
    return TextSettings(
        width=text.width,
        depth=text.depth,
        num_heads=text.num_heads,
        vocabulary=text.vocabulary,
        context=text.context,
        activation=text.activation,
        norm_eps=text.norm_eps,
        mlp_ratio=text.mlp_ratio,
        kind=text.kind,
        precision=config.model.precision,
        residual=config.model.residual,
        remat=config.run.remat,
        attention=config.run.attention,
    )


def loss_settings(config: ConfigDict) -> LossSettings:
    """The settings from which `hypjax.objectives.create_objective` builds a loss."""
    return LossSettings(
        config.objective.to_dict(),
        samples_per_class=config.train.samples_per_class,
        grouped=config.train.sampling in GROUPED,
        tuple_size=2 + config.train.tuples.negatives,
        boxed=config.train.sampling == "boxes",
    )


def sampling_settings(config: ConfigDict) -> Sampling:
    """How batches are sampled."""
    train, tuples = config.train, config.train.tuples
    return Sampling(
        name=train.sampling,
        seed=config.seed,
        batch_size=train.batch_size,
        samples_per_class=train.samples_per_class,
        repeats_images=train.repeat_images,
        unlabelled=train.unlabelled,
        pairs=tuples.pairs,
        negatives=tuples.negatives,
        pool=tuples.pool,
    )


def schedule_settings(config: ConfigDict) -> Schedule:
    """How long a run is, and how often it is saved, validated and logged."""
    train, run = config.train, config.run
    return Schedule(
        total_steps=train.total_steps,
        head_warmup_steps=train.head_warmup_steps,
        validate_every=config.eval.every,
        patience=train.patience,
        checkpoint_every=run.checkpoint_every,
        log_every=run.log_every,
    )


def watch_settings(config: ConfigDict, sampling: Sampling) -> Watch:
    """When steps that are not finite, or that teach nothing, are reported or end a run."""
    train = config.train
    return Watch(
        batch_size=sampling.batch_size,
        samples_per_class=sampling.samples_per_class,
        total_steps=train.total_steps,
        warmup_steps=config.optim.warmup_steps,
        stops_on_collapse=train.on_collapse == "stop",
        max_skipped=train.max_nonfinite if train.on_nonfinite == "skip" else 0,
    )
