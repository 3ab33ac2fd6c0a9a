"""Scores of mteb's tasks equal hypjax's, by the distance of the model's own space."""

import numpy as np
import pytest

import hypjax
from hypjax.errors import UserError
from hypjax.geometry import Sphere
from hypjax.retrieval import recall_at_k
from tests.helpers import small_runs
from tests.helpers.manual import programs
from tests.helpers.texts import released, write_tokenizer

mteb = pytest.importorskip("mteb", reason="needs mteb")
datasets = pytest.importorskip("datasets", reason="needs datasets")
from hypjax.integrations import mteb as mteb_encoder  # noqa: E402
from hypjax.integrations.mteb import MtebEncoder  # noqa: E402

CURVED = ("objective.c=0.5", "objective.clip_radius=None", "model.head=none")


@pytest.fixture(scope="module")
def task(photos_folder):
    """A task of mteb like those of MIEB: each photo is a query, and in the gallery itself."""
    from mteb.abstasks.retrieval import AbsTaskRetrieval
    from mteb.abstasks.task_metadata import TaskMetadata

    paths = sorted(photos_folder.rglob("*.png"))
    names = [f"{path.parent.name}-{path.stem}" for path in paths]
    images = datasets.Dataset.from_dict({"id": names, "image": list(map(str, paths))})
    images = images.cast_column("image", datasets.Image())

    class Photos(AbsTaskRetrieval):
        metadata = TaskMetadata(
            name="Photos",
            dataset={"path": "none/photos", "revision": "1"},
            description="Photos of ten classes.",
            type="Any2AnyRetrieval",
            category="i2i",
            modalities=["image"],
            eval_splits=["test"],
            eval_langs=["eng-Latn"],
            main_score="hit_rate_at_1",
        )
        skip_first_result = True

        def load_data(self, **options):
            relevant = {x: {y: 1 for y in names if x != y and x[:6] == y[:6]} for x in names}
            split = {"corpus": images, "queries": images, "relevant_docs": relevant}
            split["top_ranked"] = None
            self.dataset, self.data_loaded = {"default": {"test": split}}, True

    task = Photos()
    task.load_data()
    return task


@pytest.fixture(scope="module")
def encoder(photos_folder, tmp_path_factory):
    run = tmp_path_factory.mktemp("runs") / "photos"
    small_runs.save_untrained(small_runs.load(photos_folder, *CURVED), run)
    return MtebEncoder(run)


def test_scores_equal_hypjax(task, encoder, monkeypatch, tmp_path):
    monkeypatch.setenv("MTEB_CACHE", str(tmp_path))
    monkeypatch.setattr(mteb, "get_task", lambda name: task)
    monkeypatch.setattr(mteb_encoder, "MtebEncoder", lambda name: encoder)
    values = {}
    exec(programs("take-it-with-you.md", "mteb")[0], values)
    (scores,) = values["result"].task_results[0].scores["test"]
    assert values["result"].task_results[0].get_score() == scores["hit_rate_at_1"]
    images = task.dataset["default"]["test"]["corpus"]
    points, space = encoder.encode([{"image": images["image"][:]}]), encoder.space
    labels = np.array([name[:6] for name in images["id"]])
    for k, recall in recall_at_k(points, labels, ks=(1, 3, 5, 10), space=space).items():
        np.testing.assert_allclose(scores[f"hit_rate_at_{k}"], recall, atol=1e-5)
    cosines = Sphere().embed(points)
    assert recall_at_k(cosines, labels, ks=(10,), space=Sphere())[10] != scores["hit_rate_at_10"]


def test_similarities_are_distances_of_the_space(task, encoder):
    images = task.dataset["default"]["test"]["corpus"][:6]["image"]
    points = encoder.encode([{"image": images[:4]}, {"image": images[4:]}])
    distances = np.asarray(encoder.space.distance(points[:, None], points))
    np.testing.assert_allclose(encoder.similarity(points, points), -distances, atol=1e-5)
    pairs = encoder.similarity_pairwise(points[:3], points[3:])
    np.testing.assert_allclose(pairs, -np.diag(distances[:3, 3:]), atol=1e-5)
    with pytest.raises(UserError, match="this model embeds images, but the task has text"):
        encoder.encode([{"text": ["a bird"]}])


def test_texts_are_embedded_beside_images(photos_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("hypjax.inference.released.read_language_image", lambda _: released())
    write_tokenizer(tmp_path)
    (tmp_path / "meru.pth").write_bytes(b"weights")
    encoder, model = MtebEncoder(tmp_path / "meru.pth"), hypjax.load(tmp_path / "meru.pth")
    assert encoder.mteb_model_meta.modalities == ["image", "text"]
    texts = ["a plum", "a pear", "x"]
    points = encoder.encode([{"text": texts[:2]}, {"text": texts[2:]}])
    np.testing.assert_allclose(points, model.embed_texts(texts).vectors, rtol=1e-5, atol=5e-6)
