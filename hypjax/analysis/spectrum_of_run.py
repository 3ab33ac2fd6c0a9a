"""How the embeddings of a trained run spread, before and after its training."""

from jaxtyping import PyTree
from ml_collections import ConfigDict

from hypjax.analysis.run_embeddings import head_points
from hypjax.analysis.spectrum import find_spread
from hypjax.analysis.spectrum_result import Run, Spread
from hypjax.data.dataset import Dataset
from hypjax.data.parts import Splits
from hypjax.errors import UserError
from hypjax.objectives import create_objective
from hypjax.training.states import restore_trained, untrained_parameters


def spread_of_run(
    name: str, workdir: str, config: ConfigDict, splits: Splits, images: Dataset
) -> Run:
    """Embeds images with a run's model before training, and with its best, or its last.

    Points are those of the head in the objective's `score_space`, without the projections of
    `eval.pca`.

    Args:
        name: Name of the run in reports.
        workdir: Folder or URL of the run.
        config: Its configuration.
        splits: Its dataset.
        images: The images.

    Raises:
        UserError: The folder holds no trained model, the weights from which it started are gone,
            the images have changed, an image cannot be read, a point is not finite, all are
            equal, or the device's memory does not suffice.
    """
    space = create_objective(config).score_space
    trained = restore_trained(workdir, config, splits.fingerprint, with_objective=False)

    def spread(state: str, params: PyTree) -> Spread:
        points = head_points(config, trained.model, params, space)(images)
        try:
            return find_spread(points, images.labels, space)
        except UserError as error:
            raise UserError(f"{name}, {state}: {error}") from error

    before = spread("untrained", untrained_parameters(config))
    return Run(name, before, spread("trained", trained.params))
