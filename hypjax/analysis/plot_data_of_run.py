"""The embeddings of a trained run, and its hierarchical proxies, to be drawn."""

import functools
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Float, Int
from PIL import Image

from hypjax.analysis.plot_data import Drawn, Part, choose, describe
from hypjax.analysis.run_embeddings import head_points, saved_configs
from hypjax.analysis.trees import ancestors
from hypjax.data.dataset import Dataset
from hypjax.data.groupings import groupings
from hypjax.data.splits import open_splits
from hypjax.errors import UserError
from hypjax.geometry import Space
from hypjax.objectives import Hier, create_objective
from hypjax.system import console
from hypjax.training.states import restore_trained


def draw_run(workdir: str, parts: Sequence[str], most: int, seed: int) -> Drawn:
    """Embeds images of a run's dataset with its best model, or else its last.

    Points are those of the head in the objective's `score_space`, without the projections of
    `eval.pca`.

    Args:
        workdir: Folder or URL of the run.
        parts: Names of the parts of the dataset to draw: train or test.
        most: Largest number of images of a part; of more, random ones are chosen.
        seed: Seed of the choice.

    Raises:
        UserError: The folder holds no trained model, the images have changed, an image cannot be
            read, or a point is not finite.
    """
    config = saved_configs([workdir])[workdir]
    splits = open_splits(config)
    objective = create_objective(config)
    space, has_proxies = objective.score_space, isinstance(objective, Hier)
    trained = restore_trained(workdir, config, splits.fingerprint, with_objective=has_proxies)
    embed = head_points(config, trained.model, trained.params, space)
    found = []
    for name in parts:
        dataset = getattr(splits, name)
        if dataset is None:
            raise UserError(f"{config.data.name} has no {name} images; leave out --parts={name}")
        chosen = choose(len(dataset), most, seed)
        console.say(f"embedding {len(chosen):,} {name} images")
        images = dataset.take(chosen)
        title = describe(name, len(images), len(dataset))
        names = [images.name(i) for i in range(len(images))]
        read = functools.partial(_read, images)
        grouped = groupings(config.data.name, images)
        found.append(Part(title, embed(images), grouped, names, read))
    if not has_proxies:
        return Drawn(found, space, found[0].points[:0], np.zeros(0, int))
    proxies = np.asarray(jax.jit(space.embed)(trained.objective["hierarchy"]))
    space.check(proxies)
    return Drawn(found, space, proxies, _parents(proxies, space))


def _parents(proxies: Float[np.ndarray, "p d"], space: Space) -> Int[np.ndarray, " p"]:
    measured = np.asarray(space.distance_matrix(proxies, np.pad(proxies, ((0, 1), (0, 0)))))
    among, radii = measured[:, :-1], measured[:, -1]  # The last column is the origin's.
    return ancestors(among, radii, radii)


def _read(images: Dataset, i: int) -> Image.Image:
    return images.image(i, 3).convert("RGB")
