"""Scores embeddings of any model, or encoders: Recall@K, MAP@R, R-precision, mAP."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal

from hypjax import command
from hypjax.catalogue import DatasetName
from hypjax.errors import UserError, counted, require_package

_DEFAULT_KS = (1, 2, 4, 8, 10, 100, 1000)
# Modules that --compare imports, with the packages that have them.
_PEERS = {"torchmetrics": {"torchmetrics": "torchmetrics"}}
_PEERS |= {"pml": {"pytorch_metric_learning": "pytorch-metric-learning", "faiss": "faiss-cpu"}}


@dataclasses.dataclass(frozen=True)
class Source:
    """The flags of what is scored: embeddings in files, or a prepared dataset.

    Args:
        embeddings: Without --encoder: file of features or embeddings: .npz or .h5, with the arrays
            features and labels, or others that are named, as in 'f.h5?features=emb&label=kind';
            .npy, with --labels; .parquet, .csv or .pt; or a file that python -m hypjax.embed wrote.
        labels: Without --encoder: file with the classes: .npy, .pt, or .txt with one class per
            line.
        coarse_labels: Without --encoder: file with the coarse classes, such as Food, or
            Food/Fruit for several levels.
        queries: Without --encoder: file of queries that search --embeddings. Default: the
            embeddings search each other.
        query_labels: With --queries: file with the queries' classes.
        query_coarse_labels: With --queries: file with the queries' coarse classes.
        ground_truth: Without --encoder: file of Revisited Oxford or Paris with what each query
            should find, such as gnd_roxford5k.pkl. Default: images of the query's class.
        dataset: Prepared dataset to score --encoder on; or the dataset of the images in
            --embeddings, which is needed if the dataset has a ground truth.
        data_dir: With --dataset: folder of prepared datasets. Default: ~/tensorflow_datasets.
    """

    embeddings: str | None = None
    labels: str | None = None
    coarse_labels: str | None = None
    queries: str | None = None
    query_labels: str | None = None
    query_coarse_labels: str | None = None
    ground_truth: str | None = None
    dataset: DatasetName | None = None
    data_dir: str | None = None


def main(
    *,
    source: Source,
    external: command.EncoderFlags,
    batch_size: command.Positive | None = None,
    space: Literal["sphere", "ball", "euclidean"] | None = None,
    c: command.NonNegative = 0.1,
    clip_radius: command.NonNegative = 2.3,
    ks: tuple[command.Positive, ...] | None = None,
    metrics: tuple[str, ...] | None = None,
    keep_self: bool = False,
    compare: tuple[Literal["torchmetrics", "pml"], ...] | None = None,
    output: command.Numbers | None = None,
) -> None:
    """Prints the scores with confidence intervals, and can write them to a file.

    Args:
        source: Embeddings to score, with labels and queries, or a dataset.
        external: An encoder to score.
        batch_size: With --encoder: number of images at once. Default: 64.
        space: Space to compare features in; sphere compares by cosine. Default: the file's space,
            or sphere.
        c: With --space=ball: the ball has curvature -c.
        clip_radius: With --space=ball: norm to which features are clipped; 0 for no clipping.
        ks: Values of K in Recall@K. Default: those of 1, 2, 4, 8, 10, 100 and 1000 that are below
            the number of items.
        metrics: recall, precision and mp (each at --ks), mrr, map@r, r_precision, map, h_ap, ndcg,
            asi. Default: recall, map@r and r_precision, and with coarse labels h_ap, ndcg and asi;
            with a ground truth map.
        keep_self: Let queries that are in the gallery find themselves.
        compare: Libraries whose scores are printed beside hypjax's, with the reason where they
            differ; pml is pytorch-metric-learning.
        output: File to write the scores to, such as scores.json.

    Example:
        python -m hypjax.score --embeddings=gallery.npz
    """
    command.require_one(embeddings=source.embeddings, encoder=external.encoder)
    if external.encoder:
        command.require_one(dataset=source.dataset)
    elif source.dataset and source.queries:
        raise UserError("the queries of --dataset are in --embeddings; leave out --queries")
    from hypjax.experiment import scoring
    from hypjax.retrieval.metrics import metric_names
    from hypjax.system import caches

    caches.keep_compiled_programs()
    _require_metrics(metrics or ())
    _require_peers(compare or ())
    task = _task(source, external, batch_size, _space(space, c, clip_radius), keep_self)
    defaults = ["recall", "map@r", "r_precision", *scoring.graded_metrics(task)]
    if compare and task.ground_truth:
        raise UserError("--compare needs classes, but these images have a ground truth instead")
    chosen = metrics or (["map"] if task.ground_truth is not None else defaults)
    default_ks = [k for k in _DEFAULT_KS if k < task.num_items] or [1]
    found_ks = scoring.findable(ks, task.num_items, "--ks") if ks else default_ks
    scores = scoring.score(task, metric_names(chosen, found_ks))
    _print(scores, task, "Euclidean space" if space == "euclidean" else task.queries.space)
    for library in compare or ():
        _compare(library, scores, task)
    if output:
        command.write_numbers(output, _numbers(scores, task))


def _space(name: str | None, c: float, clip_radius: float) -> Any:
    """The space that --space names; None for the space of the embeddings."""
    from hypjax.geometry import PoincareBall, Sphere

    if name is None:
        return None
    if name == "sphere":
        return Sphere()
    if name == "ball":
        return PoincareBall(c, clip_radius or None)
    return PoincareBall(0.0, None)  # Distances are twice the Euclidean ones.


def _require_metrics(names: Sequence[str]) -> None:
    """Raises a `UserError` that names the first unknown metric."""
    from hypjax.config.choices import METRICS

    for name in names:
        if name not in METRICS and name.partition("@")[0] not in METRICS:
            raise UserError(f"unknown metric {name!r}; it must be one of {', '.join(METRICS)}")


def _numbers(scores: dict[str, Any], task: Any) -> dict[str, Any]:
    """The fields of --output."""
    from hypjax.geometry.registry import describe_space

    return {
        **{name: score["mean"] for name, score in scores.items()},
        "intervals": {name: score["interval"] for name, score in scores.items()},
        "queries": len(task.queries),
        "items": len(task.gallery or task.queries),
        "space": describe_space(task.queries.space),
    }


def _print(scores: dict[str, Any], task: Any, space: object) -> None:
    """Prints a table of the scores, with notes on what limits them."""
    from hypjax.runs.tables import aligned
    from hypjax.system import console

    tables = [task.queries] if task.gallery is None else [task.queries, task.gallery]
    if num_unreadable := max(len(table.unreadable) for table in tables):
        console.say(f"left out: {counted(num_unreadable, 'image')} that could not be read")
    if all(table.all_clipped() for table in tables):
        console.say("all features are longer than the clip radius: they rank as on the sphere")
    classes = [set(table.labels.tolist()) for table in tables]
    if not task.ground_truth and len(set.union(*classes)) == 1:
        console.warn("all images are of one class, so that every score is 1")
    of_classes = "" if task.ground_truth else f" of {counted(len(classes[0]), 'class')}"
    among = "among themselves" if task.gallery is None else f"among {len(task.gallery):,}"
    preposition = "on" if task.queries.space.normalized else "in"
    print(f"{len(task.queries):,} queries{of_classes} {among}, {preposition} {space}:")
    rows = [("", "", "mean", "95% interval over queries")]
    for name, score in scores.items():
        interval = "{:.4f} to {:.4f}".format(*score["interval"])
        rows.append((name, "", f"{score['mean']:.4f}", interval))
    print(aligned(rows))


def _require_peers(libraries: Sequence[str]) -> None:
    for library in libraries:
        for module, package in _PEERS[library].items():
            require_package(module, f"--compare={library}", package)


def _compare(library: str, scores: dict[str, Any], task: Any) -> None:
    """Prints another library's scores beside hypjax's, and why they differ."""
    from hypjax.integrations import metric_libraries
    from hypjax.runs.tables import aligned

    figures = getattr(metric_libraries, f"by_{library}")(task, [*scores])
    rows = [("", "", "hypjax", library, "")]
    for name, (theirs, value, why) in figures.items():
        ours = scores[name]["mean"]
        reason = f"docs/differences.md: {why}" if "#" in why else why
        reason = "" if abs(ours - value) < 5e-5 else f"  {reason}"
        rows.append((name, theirs, f"{ours:.4f}", f"{value:.4f}", reason))
    print(f"\n{aligned(rows)}")


def _task(
    source: Source,
    external: command.EncoderFlags,
    batch_size: int | None,
    space: Any,
    keep_self: bool,
) -> Any:
    """Reads or computes the embeddings, and builds their scoring `Task`."""
    from hypjax.data.ground_truth import read_ground_truth
    from hypjax.data.opening import open_prepared
    from hypjax.experiment.scoring import require_images, task_of
    from hypjax.galleries.embeddings import Embeddings
    from hypjax.system import console

    splits = open_prepared(source.dataset, source.data_dir) if source.dataset else None
    for note in splits.notes if splits else ():
        console.say(note)
    benchmark = read_ground_truth(source.ground_truth) if source.ground_truth else None
    load = functools.partial(Embeddings.load, space=space, overwrite=True)
    if source.embeddings:
        labels, coarse_labels = source.labels, source.coarse_labels
        embeddings = load(source.embeddings, labels=labels, coarse_labels=coarse_labels)
        if splits:
            require_images(embeddings, splits)
    elif splits:
        embedder = external.open(space=space, batch_size=batch_size)
        embeddings = embedder.embed_images(splits.images(scored=True))
    queries = None
    if source.queries:
        labels, coarse_labels = source.query_labels, source.query_coarse_labels
        queries = load(source.queries, labels=labels, coarse_labels=coarse_labels)
    ground_truth = splits.ground_truth if splits else None
    return task_of(embeddings, queries, benchmark, ground_truth, keep_self=keep_self)


if __name__ == "__main__":
    command.run(main)
