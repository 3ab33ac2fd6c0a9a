"""The hierarchy of a trained run, whose proxies are restored with the model."""

import jax
import numpy as np
from ml_collections import ConfigDict

from hypjax.analysis.hierarchy import Hierarchy, Images, find_hierarchy
from hypjax.analysis.run_embeddings import head_points
from hypjax.data.parts import Splits
from hypjax.objectives import Hier, create_objective
from hypjax.training.states import restore_trained


def hierarchy_of_run(
    name: str, workdir: str, config: ConfigDict, splits: Splits, images: Images
) -> Hierarchy:
    """Embeds images with a run's best model, or its last, and finds their hierarchy.

    Points are those of the head in the objective's `score_space`, without the projections of
    `eval.pca`; hierarchical proxies are those of the same state.

    Args:
        name: Name of the run in reports.
        workdir: Folder or URL of the run.
        config: Its configuration.
        splits: Its dataset.
        images: The images.

    Raises:
        UserError: The folder holds no trained model, the images have changed, an image cannot be
            read, a point is not finite, or the device's memory does not suffice.
    """
    objective = create_objective(config)
    has_proxies, space = isinstance(objective, Hier), objective.score_space
    trained = restore_trained(workdir, config, splits.fingerprint, with_objective=has_proxies)
    points = head_points(config, trained.model, trained.params, space)(images.dataset)
    proxies = None
    if has_proxies:
        proxies = np.asarray(jax.jit(space.embed)(trained.objective["hierarchy"]))
        space.check(proxies)
    return find_hierarchy(name, points, space, images, proxies)
