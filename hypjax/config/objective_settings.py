"""What objectives read of a configuration."""

from ml_collections import ConfigDict

from hypjax.config.choices import GROUPED
from hypjax.objectives.base import LossSettings


def loss_settings(config: ConfigDict) -> LossSettings:
    """The settings from which `hypjax.objectives.create_objective` builds a loss."""
    return LossSettings(
        config.objective.to_dict(),
        samples_per_class=config.train.samples_per_class,
        grouped=config.train.sampling in GROUPED,
        tuple_size=2 + config.train.tuples.negatives,
    )
