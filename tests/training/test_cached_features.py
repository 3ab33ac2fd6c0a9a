"""Training the head on the frozen encoder's embeddings, which are computed once."""

import collections
import contextlib
import functools
import shutil

import jax
import numpy as np
import pytest

from hypjax.analysis.report import write_own_report
from hypjax.config.choices import freezes_encoder
from hypjax.data.dataset import Dataset
from hypjax.errors import UserError
from hypjax.evaluate import evaluate
from hypjax.inference.weights import restore_best
from hypjax.system import machine
from hypjax.training import train
from hypjax.training.dry_run import dry_run
from hypjax.training.input import open_input
from hypjax.training.setup import build
from hypjax.training.states import random_state
from hypjax.training.step import make_train_step, shard_batch
from tests.helpers import small_runs
from tests.helpers.pictures import write_squares

FROZEN = ("optim.frozen=encoder", "eval.every=0")
CACHED = (*FROZEN, "train.cached_features=True")
PCA = ("model.head_init=pca", "model.head_dim=16")


@pytest.fixture(scope="module")
def squares(tmp_path_factory):
    """Photos of 20 × 20 pixels, whose crops can be their test views."""
    return write_squares(tmp_path_factory.mktemp("squares"), 20)


# A crop of the whole image without flips is the test view of a square image.
VIEWS = ("data.crop_area=0.999999,1", "data.crop_ratio=1,1", "data.flip=0")


@pytest.fixture(scope="module")
def computed(squares, tmp_path_factory):
    """A run that embeds crops with its frozen encoder, and its results."""
    folder = tmp_path_factory.mktemp("computed")
    return folder, train.train_and_evaluate(small_runs.load(squares, *FROZEN, *VIEWS), folder)


@pytest.mark.slow
def test_training_is_that_of_the_same_views_on_a_frozen_encoder(squares, computed, tmp_path):
    folder, expected = computed
    config = small_runs.load(squares, *CACHED, *VIEWS)
    results = train.train_and_evaluate(config, tmp_path)
    steps = [small_runs.step_metrics(run) for run in (tmp_path, folder)]
    assert steps[0].keys() == steps[1].keys() and len(steps[0]) >= 6
    for step, values in steps[0].items():
        np.testing.assert_allclose(values, steps[1][step], rtol=1e-4)
    assert results["untrained"] == expected["untrained"]


# Of two blocks, the lower one is frozen, and what precedes it.
LOWER = (
    "model.depth=2",
    "optim.frozen=model/encoder/patch_embed,model/encoder/*_token,model/encoder/pos_embed,"
    "model/encoder/block_0",
)


def first_step(config):
    """Gradient norm and encoder after one step."""
    built = build(config)
    learner, state = built.learner, random_state(built.learner, built.spec)
    source = open_input(built, range(1), state.params["model"])
    with contextlib.closing(source.batches(range(1), built.plans)) as batches:
        batch = shard_batch(learner.mesh, next(batches))
    state, metrics = jax.jit(make_train_step(learner))(state, batch)
    return metrics["gradient_norm"], state.params["model"]["encoder"]


@pytest.mark.slow
def test_blocks_above_frozen_ones_are_trained_on_cached_activations(squares):
    one = (*LOWER, "run.mesh=1,1", "optim.warmup_steps=0")
    cached = first_step(small_runs.load(squares, *one, "train.cached_features=True"))
    computed = first_step(small_runs.load(squares, *one, *VIEWS))
    # Biases of keys have no gradient but rounding, which Adam scales up.
    alike = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=2e-5)
    jax.tree.map(alike, cached, computed)


def test_activations_can_be_cached_below_the_lowest_trained_layer_alone(squares):
    cached = "train.cached_features=True"
    assert build(small_runs.load(squares, *LOWER, cached)).learner.cached_block == "block_0"
    for whole in ("encoder", "model/encoder", "model/encoder/*"):
        frozen = small_runs.load(squares, *CACHED, f"optim.frozen={whole}")
        built = build(frozen)
        assert built.learner.cached_block is None and built.embedder.cached
    assert not freezes_encoder(("model/encoder/*/*", "head"))  # The class token is trained.
    with pytest.raises(UserError, match="its lowest layers: at least model/encoder/cls_token,"):
        build(small_runs.load(squares, "optim.frozen=model/encoder/block_0", cached))


def test_activations_that_exceed_the_memory_are_refused(squares, monkeypatch):
    config = small_runs.load(squares, *LOWER, "train.cached_features=True")
    monkeypatch.setattr(machine, "free_host_memory", lambda: 2**20 // 1000)
    with pytest.raises(UserError, match=r"block_0 for \d+ training images needs .* lower data.im"):
        dry_run(config)


@pytest.mark.slow
def test_it_resumes_and_does_not_depend_on_devices_or_slices(squares, tmp_path):
    """Batches of 8 images in slices of 5 are padded."""
    for name, fields in (("one", ["run.mesh=1,1"]), ("many", ["run.microbatch=5"])):
        config = small_runs.load(squares, *CACHED, *fields)
        train.train_and_evaluate(config, tmp_path / name)
    one, many = (small_runs.step_metrics(tmp_path / name) for name in ("one", "many"))
    np.testing.assert_allclose(list(one.values()), list(many.values()), rtol=1e-4)
    config = small_runs.load(squares, *CACHED, "run.mesh=1,1")
    with small_runs.interrupted_after(8):
        train.train_and_evaluate(config, tmp_path / "parts")
    train.train_and_evaluate(config, tmp_path / "parts")
    assert small_runs.step_metrics(tmp_path / "parts") == one


@pytest.mark.slow
def test_each_image_is_embedded_once_for_all_runs(squares, tmp_path, monkeypatch):
    """Evaluations before, within and after training, the report, and further runs share it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    seen = collections.Counter()
    view = Dataset.test_view

    def counted(self, i, *args):
        seen[self.name(i)] += 1
        return view(self, i, *args)

    monkeypatch.setattr(Dataset, "test_view", counted)
    fields = ("eval.pca.head=4", "eval.every=4")
    config = small_runs.load(squares, *CACHED, *fields)
    results = train.train_and_evaluate(config, tmp_path / "first", report=write_own_report)
    assert (tmp_path / "first" / "report.html").exists()
    again = evaluate(config, tmp_path / "first")
    assert again == {name: results[name] for name in again} and again.keys() == {"final", "best"}
    other = small_runs.load(squares, *CACHED, *fields, "optim.learning_rate=0", *PCA)
    after = train.train_and_evaluate(other, tmp_path / "second", report=write_own_report)
    assert len(seen) == 48 and set(seen.values()) == {1}
    # Its parameters never change, so the best of equal states is the one before the first step.
    assert after["best_step"] == 0 and after["best"] == after["untrained"]
    assert after["untrained"]["encoder"] == results["untrained"]["encoder"]
    assert after["untrained"]["head"] != results["untrained"]["head"]


@pytest.mark.slow
def test_a_head_starts_from_principal_components_without_cached_features(squares, tmp_path):
    fields = ("eval.every=0", "data.validation_classes=0", "optim.learning_rate=0")
    config = small_runs.load(squares, *PCA, *fields)
    train.train_and_evaluate(config, tmp_path)
    head = restore_best(tmp_path)[2]["head"]
    assert np.abs(head["bias"]).max() > 0  # Minus the mean; a random head has none.
    with pytest.raises(UserError, match="model.head_dim is 17; it must be at most 16, the encoder"):
        build(small_runs.load(squares, "model.head_init=pca", "model.head_dim=17"))


def test_classes_with_one_image_are_left_out(squares, tmp_path, capsys):
    for name in "abcdefghijkl":
        split = "train" if name < "i" else "test"
        shutil.copytree(squares / name, tmp_path / "photos" / split / name)
    for i in range(1, 4):
        (tmp_path / "photos" / "train" / "a" / f"{i}.png").unlink()
    fields = ("data.validation_classes=0", "data.test_classes=0")
    built = build(small_runs.load(tmp_path / "photos", *CACHED, *fields))
    assert built.splits.train.num_classes == 7
    assert "1 classes with one image are left out" in capsys.readouterr().err
