"""Scores a run's models on datasets."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float, PyTree
from ml_collections import ConfigDict

from hypjax.config.choices import PARTS
from hypjax.data.dataset import Dataset
from hypjax.data.parts import Splits, Task
from hypjax.errors import UserError
from hypjax.inference.embedding import part_of
from hypjax.inference.matches import Match, choose, match_distance
from hypjax.inference.scoring import task_scores
from hypjax.inference.trained import Projections
from hypjax.parallel import processes
from hypjax.retrieval import mean_score
from hypjax.retrieval.metrics import metric_names
from hypjax.retrieval.projection import fit
from hypjax.retrieval.refinement import Refinement
from hypjax.retrieval.reranking import Reranking

if TYPE_CHECKING:
    from hypjax.inference.run import Run


class Evaluator:
    """Scores a run's models on datasets, given their parameters."""

    def __init__(self, run: Run) -> None:
        fields = run.config.eval
        self._run, self._metrics = run, metric_names(fields.metrics, fields.ks)
        reranking = Reranking() if fields.rerank else None
        self._refinement = Refinement(fields.expansion, fields.expansion_alpha, reranking)
        self._fitted: tuple[PyTree, Projections] = None, {}

    def projections(self, params: PyTree) -> Projections:
        """The projections of `eval.pca` for a model, fitted on the training images."""
        fields, spaces = self._run.config.eval, self._run.spaces(params)
        dims = {name: fields.pca[part_of(name)] for name in spaces}
        dims = {name: dim for name, dim in dims.items() if dim is not None}
        if not dims:
            return {}
        training = self._run.splits.train
        if training is None:
            raise UserError(
                "config.eval.pca is fitted on training images, and this dataset has none; name "
                "another dataset in data.name and this one in eval.benchmarks"
            )
        if self._fitted[0] is not params:  # A model is scored on several datasets.
            points, projections = self._run.images.points(params, training, spaces), {}
            for name, dim in dims.items():
                how = {"space": spaces[name], "dim": dim, "whiten": fields.whiten}
                try:
                    projections[name] = fit(points[name], **how)
                except UserError as error:
                    raise UserError(f"config.eval.pca.{part_of(name)} is {dim}: {error}") from error
            self._fitted = params, projections
        return self._fitted[1]

    def scores(self, params: PyTree, task: Task) -> dict[str, dict[str, float]]:
        """Mean scores of each part of the model, the same in all processes.

        They are {"head": {"recall@1": ...}, "encoder": {...}}; those of a judged task have names
        such as "easy/map".
        """
        means = {
            part: {name: mean_score(values) for name, values in of_part.items()}
            for part, of_part in self.query_scores(params, task).items()
        }
        return processes.from_first(lambda: means)  # Processes decide by them, so all alike.

    def query_scores(
        self, params: PyTree, task: Task
    ) -> dict[str, dict[str, Float[np.ndarray, " queries"]]]:
        """Scores of each query, whose means are `scores`."""
        points = self._points(params, task.queries)
        items = self._points(params, task.gallery) if task.gallery else {}
        metrics = self._metrics
        if task.judgements is not None:  # By mAP if recall alone is asked for.
            metrics = [name for name in metrics if not name.startswith("recall@")] or ["map"]
        how = {"metrics": metrics, "refinement": self._refinement}
        return {
            part: task_scores(task, points[part], items.get(part), space=space, **how)
            for part, space in self._run.spaces(params).items()
        }

    def test_scores(self, params: PyTree) -> dict[str, dict[str, float]]:
        """Scores on the test images and all benchmarks; judged ones as in "roxford5k/easy/map"."""
        found: dict[str, dict[str, float]] = {}
        for dataset, task in self._run.splits.tasks.items():
            prefix = f"{dataset}/" if task.judgements is not None else ""
            for part, scores in self.scores(params, task).items():
                named = {f"{prefix}{name}": value for name, value in scores.items()}
                found.setdefault(part, {}).update(named)
        return found

    def matches(self, params: PyTree) -> dict[str, Match]:
        """The distance of matches by the embeddings' fingerprint, where enough images have one."""
        if (chosen := choose(self._run.splits)) is None:
            return {}
        images, queries, gallery = chosen
        points = self._points(params, queries)
        items = self._points(params, gallery) if gallery else {}
        trained, spaces, matches = self._run.trained(params), self._run.spaces(params), {}
        for part in PARTS:
            distance = match_distance(
                *(points[part], queries.labels, items.get(part)),
                gallery.labels if gallery else None,
                space=spaces[part],
            )
            if distance is not None:
                projection = self.projections(params).get(part)
                matches[trained.fingerprint(part, projection)] = Match(distance, images)
        return matches

    def _points(self, params: PyTree, dataset: Dataset) -> dict[str, Float[np.ndarray, "n d"]]:
        """Embeds a dataset, and projects what is projected."""
        points = self._run.images.points(params, dataset, self._run.spaces(params))
        projections = self.projections(params).items()
        return points | {name: each.apply(points[name]) for name, each in projections}


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
