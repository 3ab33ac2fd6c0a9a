"""Steps that are not finite, and runs that end without an error and learn nothing."""

import math

import numpy as np
import pytest
from ml_collections import ConfigDict

from hypjax import train
from hypjax.config import load_config
from hypjax.errors import UserError
from hypjax.monitoring.health import HealthWatch, warn_if_collapsed
from hypjax.training.results import print_results
from tests.helpers import small_runs

HEALTHY = {"logit_min": -20.0, "logit_max": -0.5, "batch_recall@1": 0.6, "clipped_share": 1.0}
COLLAPSED = HEALTHY | {"logit_min": -0.9, "batch_recall@1": 0.0}
EXPLODES = ("optim.learning_rate=1e15", "optim.warmup_steps=0", "run.checkpoint_every=1")
AT_CHANCE = HEALTHY | {"batch_recall@1": 0.05}
SPAN = math.log(30)  # Of the logits that tells 16 classes apart.


def watch(stop=False):
    """Batches of 16 classes with 4 images: recall at chance is 3/63."""
    train = {"batch_size": 64, "samples_per_class": 4, "total_steps": 500}
    train["on_collapse"] = "stop" if stop else "warn"
    return HealthWatch(ConfigDict({"optim": {"warmup_steps": 20}, "train": train}))


def test_a_fault_is_reported_once_after_the_warm_up_or_ends_the_run(capsys):
    for values, message in (
        (COLLAPSED, "the embeddings have collapsed"),
        (HEALTHY | {"logit_min": -0.49 - SPAN}, "the embeddings have collapsed"),
        (AT_CHANCE, "nothing is being learned by step 70: recall@1 within a batch is 0.050, and"),
    ):
        health, stopping = watch(), watch(stop=True)
        for step in (50, 60):
            health.check(step, values)
        assert capsys.readouterr().err == ""
        for step in (70, 80):
            health.check(step, values)
        printed = capsys.readouterr().err
        assert printed.startswith(f"warning: {message}") and len(printed.splitlines()) == 1
        stopping.check(60, values)
        with pytest.raises(UserError, match="train.on_collapse=stop"):
            stopping.check(70, values)
    healthy = HEALTHY | {"logit_min": -0.51 - SPAN}
    for reports in ([healthy] * 3, [AT_CHANCE, HEALTHY, COLLAPSED, AT_CHANCE]):
        health = watch(stop=True)
        for i, values in enumerate(reports):  # A fault of a single report is none.
            health.check(60 + i, values)


def test_a_head_that_loses_to_the_features_it_was_given_says_so(capsys):
    config = load_config("folder:hyp-lite,frozen", ["data.path=photos"])
    before = {"head": {"recall@1": 0.5}, "encoder": {"recall@1": 0.65}}
    for head, warned in ((0.6, True), (0.7, False)):
        print_results({"untrained": before, "final": {"head": {"recall@1": head}}}, config)
        assert ("0.6500, and 0.6000 with the head" in capsys.readouterr().err) == warned


@pytest.mark.parametrize(
    ("validation", "images"), [((0.8, 0.9), ""), ((0.9, 0.8), "validation"), (None, "test")]
)
def test_whether_training_helped_is_judged_as_the_model_is_chosen(capsys, validation, images):
    def scores(untrained, final):
        parts = ("untrained", untrained), ("final", final)
        return {state: {"head": {"recall@1": recall}} for state, recall in parts}

    results = scores(0.7, 0.6)
    if validation:
        results["validation"] = scores(*validation)
    print_results(results, load_config("glyphs"))
    said = capsys.readouterr().err
    assert (f"of the head on the {images} images was" if images else "") in said
    assert ("did not help" in said) == bool(images)


@pytest.mark.parametrize(
    ("best", "line"),
    [
        ({"best_step": 200}, "step 200, chosen on"),
        ({"best_step": 0}, "step 0, the model before training, chosen on"),
        (
            {"best_step": 200, "tied_steps": [0, 50, 200]},
            "the latest of 3 steps from 0 on that tie",
        ),
    ],
)
def test_a_tie_is_no_choice(capsys, best, line):
    scores = {"head": {"recall@1": 1.0}}
    print_results({"untrained": scores, "final": scores, **best}, load_config("glyphs"))
    assert line in capsys.readouterr().out


def test_collapsed_embeddings_are_reported(capsys):
    directions = np.random.default_rng(0).normal(size=(50, 8))
    for centre, spread, warned in ((0, 0, True), (1, 3e-7, True), (1, 1e-3, False)):
        warn_if_collapsed(np.float32(centre + spread * directions), "the search means little")
        assert ("; the search means little" in capsys.readouterr().err) == warned


@pytest.mark.slow
def test_skipping_has_a_limit(photos_folder, tmp_path, capsys):
    skipping = ("train.on_nonfinite=skip", "train.max_nonfinite=3", "eval.every=0")
    config = small_runs.load(photos_folder, *EXPLODES, *skipping)
    with pytest.raises(UserError, match="of step 5 is .* after 3 skipped updates"):
        train.train_and_evaluate(config, tmp_path)
    assert capsys.readouterr().err.count("its update is skipped") == 3
