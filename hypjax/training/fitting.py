"""Fields that fit the user's own images: composition of batches, length of training, warm-up."""

import numpy as np
from jaxtyping import Int
from ml_collections import ConfigDict

from hypjax.data.dataset import Dataset
from hypjax.errors import UserError
from hypjax.system import console

_BATCH = 64  # Images of a batch, if there are enough.
_SAMPLES = 4  # Fewest images per class in a batch.
_SHOWN = 64_000  # Images that training shows, repetitions included: minutes on two cores.


def fit_to_images(config: ConfigDict, train: Dataset) -> ConfigDict:
    """Returns the configuration with the fields filled in that are None.

    Args:
        config: The run's configuration.
        train: The training images.
    """
    config = config.copy_and_resolve_references()
    fields, optim = config.train, config.optim
    sizes = np.bincount(train.labels)
    chosen = []
    if fields.samples_per_class is None:
        fields.samples_per_class = _samples(sizes, fields.batch_size)
        chosen.append("samples_per_class")
    if fields.batch_size is None:
        classes = min(len(sizes), max(_BATCH // fields.samples_per_class, 2))
        fields.batch_size = classes * fields.samples_per_class
        chosen.append("batch_size")
    if fields.total_steps is None:
        fields.total_steps = -(-_SHOWN // fields.batch_size)
        chosen.append("total_steps")
    chosen = [f"train.{name}={fields[name]}" for name in chosen]
    if optim.warmup_steps is None:
        optim.warmup_steps = fields.total_steps // 10
        chosen.append(f"optim.warmup_steps={optim.warmup_steps}")
    if chosen:
        console.say(f"chosen for these images: {', '.join(chosen)}")
    return config


def _samples(sizes: Int[np.ndarray, " classes"], batch_size: int | None) -> int:
    """Chooses the images per class: 4, or more if there are few classes with enough images.

    Args:
        sizes: Number of images of each class.
        batch_size: Images per step, if that is set.

    Raises:
        UserError: The set batch size cannot be divided among the classes.
    """
    batch = batch_size or _BATCH
    classes = max(min(len(sizes), batch // _SAMPLES), 2)
    wanted = max(2, int(min(batch // classes, np.quantile(sizes, 0.1))))
    if batch_size is None:
        return wanted
    fitting = [s for s in range(2, batch // 2 + 1) if batch % s == 0 and batch // s <= len(sizes)]
    if not fitting:
        raise UserError(
            f"config.train.batch_size is {batch_size}; it must be the product of a number of "
            f"classes from 2 to {len(sizes)} and of 2 or more images for each, such as "
            f"{classes * wanted}"
        )
    return min(fitting, key=lambda s: (abs(s - wanted), s))
