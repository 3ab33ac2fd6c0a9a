"""Scores a model on datasets."""

from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, PyTree
from ml_collections import ConfigDict

from hypjax.config.choices import PARTS
from hypjax.data.dataset import Dataset
from hypjax.data.parts import Splits, Task
from hypjax.errors import UserError
from hypjax.geometry import Space
from hypjax.inference.embedding import part_of, scored_spaces
from hypjax.inference.features import DatasetEmbedder, evaluation_input, frozen_encodings
from hypjax.inference.matches import Match, choose, match_distance
from hypjax.inference.postprocess import Projections
from hypjax.inference.scoring import task_scores
from hypjax.models import create_embedder
from hypjax.objectives import Objective
from hypjax.parallel import processes
from hypjax.retrieval import mean_score
from hypjax.retrieval.metrics import metric_names
from hypjax.retrieval.projection import fit
from hypjax.retrieval.refinement import Refinement
from hypjax.retrieval.reranking import Reranking


class Evaluator:
    """Scores a model on datasets; compiled once, whatever their sizes."""

    def __init__(self, images: DatasetEmbedder, config: ConfigDict) -> None:
        fields = self._fields = config.eval
        self.images, self._metrics = images, metric_names(fields.metrics, fields.ks)
        reranking = Reranking() if fields.rerank else None
        self._refinement = Refinement(fields.expansion, fields.expansion_alpha, reranking)
        self._fitted: tuple[PyTree, Projections] = None, {}

    def fit(self, params: PyTree, training: Dataset | None) -> Projections:
        """Fits the projections that `scores` needs for a model; none without PCA."""
        spaces = self.images.spaces(params)
        dims = {name: self._fields.pca[part_of(name)] for name in spaces}
        dims = {name: dim for name, dim in dims.items() if dim is not None}
        if not dims:
            return {}
        if training is None:
            raise UserError(
                "config.eval.pca is fitted on training images, and this dataset has none; name "
                "another dataset in data.name and this one in eval.benchmarks"
            )
        if self._fitted[0] is not params:  # A model may be scored on several datasets.
            points, projections = self.images.points(params, training), {}
            for name, dim in dims.items():
                how = {"space": spaces[name], "dim": dim, "whiten": self._fields.whiten}
                try:
                    projections[name] = fit(points[name], **how)
                except UserError as error:
                    raise UserError(f"config.eval.pca.{part_of(name)} is {dim}: {error}") from error
            self._fitted = params, projections
        return self._fitted[1]

    def scores(
        self, params: PyTree, task: Task, projections: Projections | None = None
    ) -> dict[str, dict[str, float]]:
        """Mean scores of each part of the model, the same in all processes.

        They are {"head": {"recall@1": ...}, "encoder": {...}}; those of a judged task have names
        such as "easy/map".
        """
        found = self.query_scores(params, task, projections)
        means = {
            part: {name: mean_score(values) for name, values in of_part.items()}
            for part, of_part in found.items()
        }
        return processes.from_first(lambda: means)  # Processes decide by them, so all alike.

    def query_scores(
        self, params: PyTree, task: Task, projections: Projections | None = None
    ) -> dict[str, dict[str, Float[np.ndarray, " queries"]]]:
        """Scores of each query, whose means are `scores`."""
        points = self._projected(params, task.queries, projections)
        items = self._projected(params, task.gallery, projections) if task.gallery else {}
        metrics = self._metrics
        if task.judgements is not None:  # By mAP if recall alone is asked for.
            metrics = [name for name in metrics if not name.startswith("recall@")] or ["map"]
        how = {"metrics": metrics, "refinement": self._refinement}
        return {
            part: task_scores(task, points[part], items.get(part), space=space, **how)
            for part, space in self.images.spaces(params).items()
        }

    def matches(
        self, params: PyTree, splits: Splits, projections: Projections | None = None
    ) -> dict[str, Match]:
        """The distance of matches for each part of the model, where enough images have one."""
        if (chosen := choose(splits)) is None:
            return {}
        images, queries, gallery = chosen
        points = self._projected(params, queries, projections)
        items = self._projected(params, gallery, projections) if gallery else {}
        spaces, found = self.images.spaces(params), {}
        for part in PARTS:
            distance = match_distance(
                *(points[part], queries.labels, items.get(part)),
                gallery.labels if gallery else None,
                space=spaces[part],
            )
            found |= {} if distance is None else {part: Match(distance, images)}
        return found

    def test_scores(
        self, params: PyTree, splits: Splits, projections: Projections | None = None
    ) -> dict[str, dict[str, float]]:
        """Scores on the test images and all benchmarks; judged ones as in "roxford5k/easy/map"."""
        found: dict[str, dict[str, float]] = {}
        for dataset, task in splits.tasks.items():
            prefix = f"{dataset}/" if task.judgements is not None else ""
            for part, scores in self.scores(params, task, projections).items():
                named = {f"{prefix}{name}": value for name, value in scores.items()}
                found.setdefault(part, {}).update(named)
        return found

    def _projected(
        self, params: PyTree, dataset: Dataset, projections: Projections | None
    ) -> dict[str, np.ndarray]:
        points = self.images.points(params, dataset)
        return points | {p: each.apply(points[p]) for p, each in (projections or {}).items()}


def create_evaluator(
    config: ConfigDict,
    objective: Objective,
    *,
    parts: Sequence[str] = PARTS,
    mesh: Mesh | None = None,
    splits: Splits | None = None,
) -> Evaluator:
    """Builds a configuration's evaluator; given splits, a frozen encoder embeds each image once."""
    model, source = create_embedder(config, evaluating=True), evaluation_input(config, mesh)

    def spaces(params: PyTree) -> dict[str, Space]:
        found = scored_spaces(config, objective, params)
        return {name: space for name, space in found.items() if part_of(name) in parts}

    encodings = splits and frozen_encodings(config, model, source, splits)
    return Evaluator(DatasetEmbedder(model, spaces, source, encodings), config)


def check_depth(config: ConfigDict, splits: Splits) -> None:
    """Refuses more neighbours than there are images to find, in precision or query expansion."""
    items = [task.items for task in splits.tasks.values()]
    items += [len(splits.validation) - 1] if splits.validation else []
    if config.eval.expansion > min(items):
        raise UserError(
            f"config.eval.expansion is {config.eval.expansion}, but there are only {min(items)} "
            "images to find"
        )
    if "precision" in config.eval.metrics and max(config.eval.ks) > min(items):
        raise UserError(
            f"config.eval.ks holds {max(config.eval.ks)}, but for precision there are only "
            f"{min(items)} images to find"
        )
