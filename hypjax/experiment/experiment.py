"""An experiment: a method on images, whose models it scores."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, PyTree

from hypjax.data.dataset import Dataset
from hypjax.data.repeats import validation_task
from hypjax.data.sentences import TextInputs
from hypjax.data.splits import Splits, Task
from hypjax.errors import UserError
from hypjax.experiment.captions import caption_scores, distinct_captions, text_inputs
from hypjax.experiment.embedding import DatasetEmbedder, part_of
from hypjax.experiment.method import Method
from hypjax.experiment.scoring import graded_metrics, task_scores
from hypjax.experiment.trained import Projections
from hypjax.geometry import Space
from hypjax.parallel import processes
from hypjax.retrieval import mean_score
from hypjax.retrieval.graded import GRADED
from hypjax.retrieval.inputs import blocks, by_blocks, pad_rows
from hypjax.retrieval.metrics import metric_names
from hypjax.retrieval.postprocessing import Postprocessing, Reranking
from hypjax.retrieval.projection import fit
from hypjax.types import CAPTIONS, TEXT_ENCODER, TEXTS, Outputs

_TEXTS_AT_ONCE = 64  # That a Transformer embeds.
_VECTORS_AT_ONCE = 1 << 14  # Of texts.
_QueryScores = dict[str, Float[np.ndarray, " queries"]]  # By metric.


@dataclasses.dataclass(frozen=True, eq=False)
class Experiment:
    """A method on images and devices: what training, evaluation and analyses share.

    Attributes:
        method: The model, its objective, and how embeddings are compared.
        splits: Training, validation and test images.
        mesh: The devices that share the work.
        embedder: Embeds datasets with the model; keeps the embeddings of a frozen encoder.
        provenance: Hashes of images and code, and the precision, the same whenever a run resumes.
        name: Name in reports.
        workdir: Folder or URL of a trained run.
        parts: Parts of the model to score, "head" and "encoder".
        texts: What a tower of the model takes of the images' captions; None without any.
        parents: More general texts of each training caption, if a loss compares them.
    """

    method: Method
    splits: Splits
    mesh: Mesh
    embedder: DatasetEmbedder
    provenance: Mapping[str, str]
    name: str = ""
    workdir: str = ""
    parts: Sequence[str] = ("head", "encoder")
    texts: TextInputs | None = None
    parents: Mapping[str, Sequence[str]] | None = None
    # The last parameters for which projections were fitted, and these projections.
    _fitted: list[tuple[PyTree, Projections]] = dataclasses.field(default_factory=list, init=False)

    def spaces(self, params: PyTree) -> dict[str, Space]:
        """The spaces in which the model with these parameters is scored, by name."""
        spaces = self.method.spaces(params)
        return {name: space for name, space in spaces.items() if part_of(name) in self.parts}

    @property
    def image_provenance(self) -> dict[str, str]:
        """Hashes of images and captions, which must be those of a trained run."""
        of_texts = {x: y for x, y in self.provenance.items() if x in (CAPTIONS, TEXT_ENCODER)}
        return {**self.splits.provenance, **of_texts}

    def projections(self, params: PyTree) -> Projections:
        """Projections of `eval.pca` by space, fitted on the training images once for `params`."""
        spaces = self.spaces(params)
        pca = self.method.scoring.pca
        dims = {name: dim for name in spaces if (dim := pca[part_of(name)]) is not None}
        if not dims:
            return {}
        if self.splits.train is None:
            problem = "config.eval.pca needs training images, and this dataset has none"
            advice = "move this one to eval.benchmarks, and name another in data.name"
            raise UserError(f"{problem}; {advice}")
        if not (self._fitted and self._fitted[0][0] is params):
            points = self.embedder.points(params, self.splits.train, spaces)
            whiten, projections = self.method.scoring.whitens, {}
            for name, dim in dims.items():
                try:
                    fitted = fit(points[name], space=spaces[name], dim=dim, whiten=whiten)
                except UserError as error:
                    raise UserError(f"config.eval.pca.{part_of(name)} is {dim}: {error}") from error
                projections[name] = fitted
            self._fitted[:] = [(params, projections)]
        return self._fitted[0][1]

    def scores(self, params: PyTree, task: Task) -> dict[str, dict[str, float]]:
        """Mean scores by part and metric; with ground truth, metrics such as "easy/map"."""
        means = {
            part: {name: mean_score(values) for name, values in scores.items()}
            for part, scores in self.query_scores(params, task).items()
        }
        # All processes choose a model by the scores, so no last bit may differ between processes.
        return processes.from_first(lambda: means)

    def query_scores(self, params: PyTree, task: Task) -> dict[str, _QueryScores]:
        """Scores of each query, by part and metric."""
        queries = self._points(params, task.queries)
        gallery = self._points(params, task.gallery) if task.gallery else {}
        scoring = self.method.scoring
        metrics = metric_names(scoring.metrics, scoring.ks)
        if task.ground_truth is not None:  # Recall and graded metrics do not apply.
            metrics = [name for name in metrics if not name.startswith("recall@")]
            metrics = [name for name in metrics if name not in GRADED] or ["map"]
        else:
            too_large = [k for k in scoring.ks if k > task.num_items]
            inapplicable = metric_names(["recall", "precision"], too_large)
            if task.queries is not self.splits.validation:  # Too slow for each validation.
                metrics += graded_metrics(task)
            metrics = [name for name in dict.fromkeys(metrics) if name not in inapplicable]
        reranking = Reranking() if scoring.reranks else None
        postprocessing = Postprocessing(scoring.expansion, scoring.expansion_alpha, reranking)
        score = functools.partial(task_scores, task, metrics=metrics, postprocessing=postprocessing)
        spaces, scores = self.spaces(params), self._caption_scores(params, task, queries)
        is_alone = task.gallery is None and task.queries.num_classes == len(task.queries)
        if scores and is_alone:  # No image finds another.
            return scores
        return {
            part: scores.get(part, {}) | score(queries[part], gallery.get(part), space=space)
            for part, space in spaces.items()
        }

    def _caption_scores(
        self, params: PyTree, task: Task, points: Mapping[str, Float[np.ndarray, "n d"]]
    ) -> dict[str, _QueryScores]:
        """Scores of searches among the queries by captions, in the spaces of the whole head."""
        images = task.queries
        if self.texts is None or images.captions is None:
            return {}
        scores, ks = {}, self.method.scoring.ks
        for name, space in self.spaces(params).items():
            if name.partition(":")[0] == "head":
                texts = self.caption_points(params, images, space)
                scores[name] = caption_scores(images, points[name], texts, space=space, ks=ks)
        return scores

    def caption_points(
        self, params: PyTree, images: Dataset, space: Space
    ) -> Float[np.ndarray, "texts d"]:
        """Points of the `distinct_captions` of images, by the whole head on texts."""
        assert self.texts is not None
        rows = text_inputs(self.texts, distinct_captions(images))
        project = functools.partial(self._project_texts, params[f"towers_{TEXTS}"])
        are_tokens = np.issubdtype(rows.dtype, np.integer)
        size = min(_TEXTS_AT_ONCE if are_tokens else _VECTORS_AT_ONCE, len(rows))
        projected = [
            np.asarray(project(pad_rows(block, size)))[: len(block)]
            for block in (rows[x] for x in blocks(len(rows), size))
        ]
        return by_blocks(jax.jit(space.embed), np.concatenate(projected))

    @functools.cached_property
    def _project_texts(self) -> Callable[[PyTree, np.ndarray], Array]:
        """The head on texts, or on their whole tower, jitted once for all validations."""
        tower = self.method.model.towers[TEXTS]
        return jax.jit(lambda p, x: cast(Outputs, tower.apply({"params": p}, x)).projected)

    def validation_scores(self, params: PyTree) -> dict[str, dict[str, float]]:
        """Mean scores by part and metric on the validation images."""
        return self.scores(params, self._validation_task)

    @functools.cached_property
    def _validation_task(self) -> Task:
        assert self.splits.validation is not None
        return validation_task(self.splits.validation)

    def test_scores(self, params: PyTree) -> dict[str, dict[str, float]]:
        """Mean test scores by part and metric; a benchmark's are named "roxford5k/easy/map"."""
        test_scores: dict[str, dict[str, float]] = {}
        for dataset, task in self.splits.tasks.items():
            prefix = f"{dataset}/" if task.ground_truth is not None else ""
            for part, scores in self.scores(params, task).items():
                named_scores = {f"{prefix}{name}": value for name, value in scores.items()}
                test_scores.setdefault(part, {}).update(named_scores)
        return test_scores

    def _points(self, params: PyTree, dataset: Dataset) -> dict[str, Float[np.ndarray, "n d"]]:
        """Points in each scored space, after the projections of `eval.pca`."""
        points = self.embedder.points(params, dataset, self.spaces(params))
        for name, projection in self.projections(params).items():
            points[name] = projection.apply(points[name])
        return points
