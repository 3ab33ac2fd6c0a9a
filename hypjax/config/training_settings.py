"""What training reads of a configuration."""

from ml_collections import ConfigDict

from hypjax.settings import Sampling, Schedule, Watch


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
