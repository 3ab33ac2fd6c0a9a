"""Scores embeddings of any model, or encoders: Recall@K, MAP@R, R-precision, mAP."""

import dataclasses
import pathlib
from typing import Annotated, Any, Literal

from hypjax import command
from hypjax.catalogue import PREPARED
from hypjax.errors import UserError, counted

_DEFAULT_KS = (1, 2, 4, 8, 10, 100, 1000)


@dataclasses.dataclass(frozen=True)
class Files:
    """The flags of embeddings in files.

    Args:
        embeddings: File of features or embeddings: .npz, with the arrays features and labels;
            .npy, with --labels; .parquet, .csv or .pt; or a file that python -m hypjax.embed wrote.
            With --encoder, the file to write, or to resume.
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
    """

    embeddings: str | None = None
    labels: str | None = None
    coarse_labels: str | None = None
    queries: str | None = None
    query_labels: str | None = None
    query_coarse_labels: str | None = None
    ground_truth: str | None = None


@dataclasses.dataclass(frozen=True)
class Images:
    """The flags of images that an encoder embeds.

    Args:
        images: With --encoder: images to score the encoder on, as for python -m hypjax.embed.
        dataset: Prepared dataset to score --encoder on; or the dataset of the images in
            --embeddings, which is needed if the dataset has a ground truth.
        data_dir: With --dataset: folder of prepared datasets. Default: ~/tensorflow_datasets.
        batch_size: With --encoder: number of images at once. Default: 64.
    """

    images: str | None = None
    dataset: Literal[*PREPARED] | None = None
    data_dir: str | None = None
    batch_size: command.Positive | None = None


@dataclasses.dataclass(frozen=True)
class FeatureSpace:
    """The flags of the space in which features are compared.

    Args:
        space: Space to compare features in; sphere compares by cosine. Default: the file's space,
            or sphere.
        c: With --space=ball: the ball has curvature -c.
        clip_radius: With --space=ball: norm to which features are clipped; 0 for no clipping.
    """

    space: Literal["sphere", "ball", "euclidean"] | None = None
    c: command.NonNegative = 0.1
    clip_radius: command.NonNegative = 2.3

    def create(self) -> Any:
        """Creates the space; None, for the embeddings' own space, if `space` is None."""
        from hypjax.geometry import PoincareBall, Sphere

        spaces = {
            "sphere": Sphere(),
            "ball": PoincareBall(self.c, self.clip_radius or None),
            "euclidean": PoincareBall(0.0, None),  # Distances are twice the Euclidean ones.
        }
        return spaces.get(self.space)


def main(
    *,
    files: Files,
    external: command.ExternalEncoder,
    images: Images,
    features: FeatureSpace,
    ks: tuple[command.Positive, ...] | None = None,
    metrics: tuple[str, ...] | None = None,
    keep_self: bool = False,
    output: Annotated[pathlib.Path, command.OutputFile(".json")] | None = None,
) -> None:
    """Prints the scores with confidence intervals, and can write them to a file.

    Args:
        files: Embeddings to score, with labels and queries.
        external: An encoder to score.
        images: Images that the encoder embeds.
        features: Space of the features.
        ks: Values of K in Recall@K. Default: 1, 2, 4, 8, 10, 100 and 1000, as far as they are below
            the number of items.
        metrics: recall, precision and mp (each at --ks), mrr, map@r, r_precision, map, h_ap, ndcg,
            asi. Default: recall, map@r and r_precision, and with coarse labels h_ap, ndcg and asi;
            with a ground truth map.
        keep_self: Let queries that are in the gallery find themselves.
        output: File to write the scores to, such as scores.json.

    Example:
        python -m hypjax.score --embeddings=gallery.npz
    """
    if external.encoder:
        command.require_one(images=images.images, dataset=images.dataset)
    else:
        command.require(embeddings=files.embeddings)
        if images.dataset and files.queries:
            raise UserError("the queries of --dataset are in --embeddings; leave out --queries")
    from hypjax.geometry.registry import describe_space
    from hypjax.inference import scoring
    from hypjax.retrieval.metrics import metric_names
    from hypjax.system import caches

    caches.keep_compiled_programs()
    task = _task(files, external, images, features, keep_self)
    if not metrics:
        metrics = ["recall", "map@r", "r_precision", *scoring.graded_metrics(task)]
        if task.ground_truth is not None:
            metrics = ["map"]
    if ks:
        ks = scoring.findable(ks, task.num_items, "--ks")
    else:
        ks = [k for k in _DEFAULT_KS if k < task.num_items] or [1]
    scores = scoring.score(task, metric_names(metrics, ks))
    _print(scores, task, "Euclidean space" if features.space == "euclidean" else task.queries.space)
    if output:
        numbers = {
            **{name: score["mean"] for name, score in scores.items()},
            "intervals": {name: score["interval"] for name, score in scores.items()},
            "queries": len(task.queries),
            "items": len(task.gallery or task.queries),
            "space": describe_space(task.queries.space),
        }
        command.write_numbers(output, numbers)


def _print(scores: dict[str, Any], task: Any, space: object) -> None:
    """Prints a table of the scores, with notes on what limits them."""
    from hypjax.retrieval.inputs import by_blocks
    from hypjax.runs.tables import aligned
    from hypjax.system import console

    tables = [task.queries] if task.gallery is None else [task.queries, task.gallery]
    if missing := max(len(table.unreadable) for table in tables):
        console.say(f"left out: {counted(missing, 'image')} that could not be read")
    raw, clipped = [table.raw_features for table in tables], task.queries.space.clipped
    if all(features is not None and by_blocks(clipped, features).all() for features in raw):
        console.say("all features are longer than the clip radius: they rank as on the sphere")
    classes = [set(table.labels.tolist()) for table in tables]
    if not task.ground_truth and len(set.union(*classes)) == 1:
        console.warn("all images are of one class, so that every score is 1")
    of_classes = "" if task.ground_truth else f" of {counted(len(classes[0]), 'class')}"
    among = "among themselves" if task.gallery is None else f"among {len(task.gallery):,}"
    preposition = "on" if task.queries.space.normalized else "in"
    print(f"{len(task.queries):,} queries{of_classes} {among}, {preposition} {space}:")
    rows = [
        (name, "", f"{score['mean']:.4f}", "{:.4f} to {:.4f}".format(*score["interval"]))
        for name, score in scores.items()
    ]
    print(aligned([("", "", "mean", "95% interval over queries"), *rows]))


def _task(
    files: Files,
    external: command.ExternalEncoder,
    images: Images,
    features: FeatureSpace,
    keep_self: bool,
) -> Any:
    """Reads or computes the embeddings, and builds their scoring `Task`."""
    from hypjax.data.ground_truth import read_ground_truth
    from hypjax.inference.scoring import require_images, task_of
    from hypjax.retrieval.embeddings import Embeddings
    from hypjax.system import console

    splits = None
    if images.dataset:
        from hypjax.data.splits import open_prepared

        splits = open_prepared(images.dataset, images.data_dir)
        for note in splits.notes:
            console.say(note)
    benchmark = files.ground_truth and read_ground_truth(files.ground_truth)
    ground_truth = splits.ground_truth if splits else None
    queries, space = None, features.create()
    if external.encoder:
        embeddings = _embed(files.embeddings, external, images, splits, space)
    else:
        names = {"labels": files.labels, "coarse_labels": files.coarse_labels}
        embeddings = Embeddings.load(files.embeddings, space, **names)
        if splits:
            require_images(embeddings, splits)
    if files.queries:
        names = {"labels": files.query_labels, "coarse_labels": files.query_coarse_labels}
        queries = Embeddings.load(files.queries, space, **names)
    return task_of(embeddings, queries, benchmark, ground_truth, keep_self=keep_self)


def _embed(
    file: str | None, external: command.ExternalEncoder, images: Images, splits: Any, space: Any
) -> Any:
    """Embeds all images into a file, or without a file only the scored images."""
    from hypjax.data.photos import find_images
    from hypjax.retrieval.embeddings import Embeddings

    path = file and pathlib.Path(file).expanduser()
    if path:
        command.require_output_file("embeddings", path, ".npz")
    dataset = splits.images(scored=not path) if splits else find_images(images.images)
    embedder = external.open(space=None if path else space, batch_size=images.batch_size)
    if not path:
        return embedder.embed_images(dataset)
    embedder.embed_to(path, dataset)
    return Embeddings.load(path, space)


if __name__ == "__main__":
    command.run(main)
