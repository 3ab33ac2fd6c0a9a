"""A run: configuration, model, objective, images and devices, and scores of its parameters."""

import functools
import pathlib
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, PyTree
from ml_collections import ConfigDict

from hypjax import parallel
from hypjax.config.choices import PARTS, freezes_encoder
from hypjax.config.objective_settings import loss_settings
from hypjax.data.dataset import Dataset
from hypjax.data.repeats import own_rows
from hypjax.data.splits import Splits, Task
from hypjax.errors import UserError
from hypjax.geometry import Space
from hypjax.geometry.learned import initial_scalars, learned_scalars
from hypjax.inference.embedding import DatasetEmbedder, part_of
from hypjax.inference.scoring import findable, graded_metrics, task_scores
from hypjax.inference.weights import Projections, TrainedModel, read_models
from hypjax.models import Embedder, create_embedder, model_shapes
from hypjax.models.custom import is_custom
from hypjax.objectives import Objective, SavedObjective, create_objective
from hypjax.objectives.create import BUILT_IN
from hypjax.parallel import processes
from hypjax.retrieval import mean_score
from hypjax.retrieval.graded import GRADED
from hypjax.retrieval.metrics import metric_names
from hypjax.retrieval.postprocessing import Postprocessing, Reranking
from hypjax.retrieval.projection import fit
from hypjax.runs.images import fit_to_features, open_splits
from hypjax.runs.workdir import saved_config, saved_space
from hypjax.settings import Embedding, Pixels
from hypjax.system.caches import cache_folder
from hypjax.types import View

_QueryScores = dict[str, Float[np.ndarray, " queries"]]  # By metric.


class Run:
    """A run, assembled once for training, evaluation, embedding, analyses and exports.

    The model, objective, splits and mesh are created on first use, unless they are passed.

    Attributes:
        config: The validated configuration, with the model's sizes fitted to features.
        name: Name in reports.
        workdir: Folder or URL of a trained run.
        parts: Parts of the model to score, "head" and "encoder".
    """

    def __init__(
        self,
        config: ConfigDict,
        *,
        model: Embedder | None = None,
        objective: Objective | None = None,
        splits: Splits | None = None,
        mesh: Mesh | None = None,
        saved_space: Space | None = None,
        name: str = "",
        workdir: str = "",
        parts: Sequence[str] = PARTS,
    ) -> None:
        """`saved_space` is the score space of a run whose custom loss may not be installed."""
        self.config = fit_to_features(config)
        self.name, self.workdir, self.parts = name, workdir, parts
        self._saved_space = saved_space
        self._device = None if mesh is None else mesh.devices.flat[0]
        passed = {"model": model, "objective": objective, "splits": splits, "mesh": mesh}
        # Sets the cached properties of the same names.
        vars(self).update({name: value for name, value in passed.items() if value is not None})
        # The last parameters for which projections were fitted, and these projections.
        self._last_projections: tuple[PyTree, Projections] = None, {}

    @classmethod
    def saved(cls, folder: pathlib.Path, overrides: Sequence[str] = (), **fields: Any) -> Self:
        """Opens the run in a local folder; `hypjax.runs.cloud_copy.reading` copies a remote one."""
        return cls(saved_config(folder, overrides), saved_space=saved_space(folder), **fields)

    @functools.cached_property
    def model(self) -> Embedder:
        """The encoder and the head, in evaluation mode."""
        return create_embedder(self.config, evaluating=True, device=self._device)

    @functools.cached_property
    def objective(self) -> Objective:
        """The objective with initial learned scalars, or a stand-in that holds the saved space."""
        if self._saved_space is None or self.config.objective.name in BUILT_IN:
            return create_objective(loss_settings(self.config))
        return SavedObjective(self._saved_space)

    @functools.cached_property
    def splits(self) -> Splits:
        """The run's images: training, validation and test images."""
        splits = open_splits(self.config)
        _check_depth(self.config, splits)
        return splits

    @property
    def pixels(self) -> Pixels:
        """How images become the model's input."""
        data = self.config.data
        return Pixels(View.of(data), data.mean, data.std)

    @functools.cached_property
    def mesh(self) -> Mesh:
        """The devices that share the work."""
        return parallel.create_mesh(self.config.run.mesh)

    @property
    def shapes(self) -> PyTree:
        """Shapes of the model's parameters, including learned scalars."""
        scalars = initial_scalars(self.config.objective)
        return model_shapes(self.model, self.pixels.view, scalars)

    @functools.cached_property
    def embedder(self) -> DatasetEmbedder:
        """Embeds datasets with the model; caches the embeddings of a frozen encoder."""
        config, splits = self.config, self.splits
        cached = []
        if freezes_encoder(config.optim.frozen) and self.model.encoder.takes_pixels:
            cached = [splits.test, splits.gallery, splits.validation]
            needs_train = config.train.cached_features or config.train.sampling == "tuples"
            if needs_train or any(config.eval.pca.values()) or config.model.head_init == "pca":
                cached.append(splits.train)
        folder = None
        if not is_custom(self.model.encoder):
            folder = pathlib.Path(config.run.cache_dir or cache_folder()).expanduser() / "features"
        fields = config.run
        options = Embedding(config.eval.scales, fields.eval_batch_size, fields.workers)
        cached = list(filter(None, cached))
        return DatasetEmbedder(self.model, self.pixels, self.mesh, options, cached, folder)

    def restore(self, folder: pathlib.Path) -> dict[str, TrainedModel]:
        """Restores the last model, named "final" or "step N", and the best, "best", if any."""
        models = read_models(folder, self.config, self.model)
        return {name: self.trained(params) for name, params in models.items()}

    def restore_best(self, folder: pathlib.Path) -> TrainedModel:
        """Restores a folder's best model, or else its last."""
        return [*self.restore(folder).values()][-1]

    def trained(self, params: PyTree) -> TrainedModel:
        """The trained model with these parameters; its `fingerprint` needs unsharded parameters."""
        return TrainedModel(self.config, self.model, params, self.trained_objective(params))

    def spaces(self, params: PyTree) -> dict[str, Space]:
        """The spaces in which the model with these parameters is scored, by name."""
        spaces = self.trained(params).spaces
        return {name: space for name, space in spaces.items() if part_of(name) in self.parts}

    def trained_objective(self, params: PyTree) -> Objective:
        """The objective with the learned scalars in these parameters."""
        return self.objective.with_scalars(learned_scalars(self.config.objective, params))

    def projections(self, params: PyTree) -> Projections:
        """Projections of `eval.pca` by space, fitted on the training images once for `params`."""
        spaces = self.spaces(params)
        dims = {name: self.config.eval.pca[part_of(name)] for name in spaces}
        dims = {name: dim for name, dim in dims.items() if dim is not None}
        if not dims:
            return {}
        if self.splits.train is None:
            problem = "config.eval.pca needs training images, and this dataset has none"
            advice = "move this one to eval.benchmarks, and name another in data.name"
            raise UserError(f"{problem}; {advice}")
        if self._last_projections[0] is not params:
            points = self.embedder.points(params, self.splits.train, spaces)
            options = {"whiten": self.config.eval.whiten}
            projections = {}
            for name, dim in dims.items():
                try:
                    projections[name] = fit(points[name], space=spaces[name], dim=dim, **options)
                except UserError as error:
                    raise UserError(f"config.eval.pca.{part_of(name)} is {dim}: {error}") from error
            self._last_projections = params, projections
        return self._last_projections[1]

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
        fields = self.config.eval
        metrics = metric_names(fields.metrics, fields.ks)
        if task.ground_truth is not None:  # Recall and graded metrics do not apply.
            metrics = [name for name in metrics if not name.startswith("recall@")]
            metrics = [name for name in metrics if name not in GRADED] or ["map"]
        else:
            too_large = [k for k in fields.ks if k > task.num_items]
            inapplicable = metric_names(["recall", "precision"], too_large)
            if task.queries is not self.splits.validation:  # Too slow for each validation.
                metrics += graded_metrics(task)
            metrics = [name for name in dict.fromkeys(metrics) if name not in inapplicable]
        reranking = Reranking() if fields.rerank else None
        postprocessing = Postprocessing(fields.expansion, fields.expansion_alpha, reranking)
        score = functools.partial(task_scores, task, metrics=metrics, postprocessing=postprocessing)
        return {
            part: score(queries[part], gallery.get(part), space=space)
            for part, space in self.spaces(params).items()
        }

    def validation_scores(self, params: PyTree) -> dict[str, dict[str, float]]:
        """Mean scores by part and metric on the validation images."""
        return self.scores(params, self._validation_task)

    @functools.cached_property
    def _validation_task(self) -> Task:
        images = self.splits.validation
        return Task(images, own_rows=own_rows(images, None))

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


def _check_depth(config: ConfigDict, splits: Splits) -> None:
    """Raises a `UserError` if searches need more neighbours than there are images to find."""
    num_items = min(task.num_items for task in splits.tasks.values())
    if splits.validation:
        num_items = min(num_items, len(splits.validation) - 1)
    depths = {"config.eval.expansion is": config.eval.expansion}
    if "precision" in config.eval.metrics:
        depths["for precision, config.eval.ks holds"] = max(config.eval.ks)
    for setting, depth in depths.items():
        if depth > num_items:
            raise UserError(f"{setting} {depth}, but there are only {num_items} images to find")
    findable(config.eval.ks, num_items, "config.eval.ks")  # Prints which K are left out.
