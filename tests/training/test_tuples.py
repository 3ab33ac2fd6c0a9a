"""Training on mined tuples: what an epoch shows, how a run resumes, and what is refused."""

import dataclasses

import numpy as np
import pytest

from hypjax import train
from hypjax.assemble import assemble_training
from hypjax.config import load_config
from hypjax.data.preparation.prepare import prepare
from hypjax.errors import UserError
from hypjax.evaluate import evaluate
from hypjax.training import states
from hypjax.training.input import Input
from tests.helpers import object_files, small_runs

TINY = (
    *("data.image_size=16", "data.resize=16", "model.weights=None", "model.architecture=vit"),
    *("model.patch_size=8", "model.width=16", "model.depth=1", "model.num_heads=2"),
    *("train.tuples.negatives=2", "train.tuples.pool=10", "train.batch_size=8"),
    *("train.total_steps=11", "optim.learning_rate=1e-3", "objective.koleo_weight=0.1"),
    *("eval.benchmarks=('roxford5k',)", "run.log_every=1", "run.checkpoint_every=3"),
    "run.report=False",
)


@pytest.fixture(scope="module")
def objects_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("objects")
    object_files.write_sfm(folder)
    object_files.write_roxford(folder)
    for name in ("sfm120k", "roxford5k"):
        where = {"data_dir": str(folder / "data"), "manual_dir": str(folder)}
        prepare(name, **where, allow_partial=True)
    return folder / "data"


@pytest.fixture(scope="module")
def load(objects_dir):
    def load(*overrides):
        return load_config("sfm:irt-r-deit-s", [*TINY, f"run.data_dir={objects_dir}", *overrides])

    return load


def mined(config, epoch=0):
    built = assemble_training(config)
    state = states.first_state(built.learner, built.sizes)
    return built, Input(built).mine(built.plans, state.params["model"], epoch)


def test_tuples_are_pairs_with_negatives_of_other_classes_in_the_pool(load):
    built, table = mined(load())
    plans = built.plans
    pairs, pool = plans.candidates(0)
    assert (plans.batches_per_epoch, table.shape, len(pool)) == (4, (8, 4), 10)
    np.testing.assert_array_equal(table[:, :2], pairs)
    assert {tuple(pair) for pair in pairs} == {tuple(pair) for pair in plans.pairs}
    assert set(table[:, 2:].ravel()) <= set(pool)
    classes = plans.labels[table]
    assert (classes[:, 0] == classes[:, 1]).all()
    assert all(len({*row}) == 3 for row in classes)  # One of the pair, two of negatives.
    assert plans.candidates(0)[1].tolist() == pool.tolist() != plans.candidates(1)[1].tolist()
    plans = dataclasses.replace(plans, table=table)  # An epoch shows each tuple once.
    shown = [plans(step).ids.reshape(2, 4) for step in range(4, 8)]
    np.testing.assert_array_equal(np.concatenate(shown), table)
    np.testing.assert_array_equal(plans(5).labels, plans.labels[plans(5).ids])


def test_negatives_are_mined_with_the_pooling_of_training(load):
    pooled = (mined(load(f"model.eval_pooling={pooling}"))[1] for pooling in ("cls", "avg"))
    np.testing.assert_array_equal(*pooled)


def test_pairs_of_held_out_classes_are_not_trained_on(load):
    fields = ("data.validation_classes=2", "train.tuples.negatives=1", "train.batch_size=6")
    built = assemble_training(load(*fields))
    names = {built.images.name(i) for pair in built.plans.pairs for i in pair}
    held_out = {
        built.experiment.splits.validation.name(i)
        for i in range(len(built.experiment.splits.validation))
    }
    assert len(names) == 6 and not names & held_out


@pytest.mark.slow
def test_a_run_killed_in_an_epoch_sees_the_same_tuples(load, tmp_path):
    config, (whole, run) = load("run.checkpoint_every=2"), (tmp_path / "whole", tmp_path / "run")
    results = train.train_and_evaluate(config, whole)
    for killed in (4, 6):
        with small_runs.interrupted_after(killed + 1):
            train.train_and_evaluate(config, run)
    assert train.train_and_evaluate(config, run) == results
    assert small_runs.step_metrics(run) == small_runs.step_metrics(whole)
    assert evaluate(config, run)["final"] == results["final"]
    scores = results["final"]["head"]
    assert list(scores)[:3] == ["recall@1", "recall@5", "recall@10"]
    assert {f"roxford5k/{level}/mp@10" for level in ("easy", "medium", "hard")} <= scores.keys()


def test_what_has_no_tuples_is_refused(load, load_glyphs):
    with pytest.raises(UserError, match="4 negatives of other classes"):
        mined(load("train.tuples.negatives=4", "train.batch_size=12"))
    fields = ("train.sampling=tuples", "objective.name=contrastive", "train.batch_size=14")
    with pytest.raises(UserError, match="lists no pairs of images; set data.name=sfm120k"):
        assemble_training(load_glyphs(*fields))
