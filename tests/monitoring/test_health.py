"""Steps that are not finite, and runs that end without an error and learn nothing."""

import math

import numpy as np
import pytest

from hypjax import train
from hypjax.config import load_config
from hypjax.errors import UserError
from hypjax.monitoring.health import HealthWatch, warn_if_collapsed
from hypjax.runs.tables import format_best_step
from hypjax.settings import Watch
from hypjax.training.results import print_results
from tests.helpers import small_runs

HEALTHY = {"logit_min": -20.0, "logit_max": -0.5, "batch_recall@1": 0.6, "clipped_share": 1.0}
COLLAPSED = HEALTHY | {"logit_min": -0.9, "batch_recall@1": 0.0}
EXPLODES = ("optim.learning_rate=1e15", "optim.warmup_steps=0", "run.checkpoint_every=1")
AT_CHANCE = HEALTHY | {"batch_recall@1": 0.05}
SPAN = math.log(30)  # Of the logits that tells 16 classes apart.


def watch(on_collapse="stop"):
    """Batches of 16 classes with 4 images: recall at chance is 3/63."""
    return HealthWatch(Watch(64, 4, 500, 20, stops_on_collapse=on_collapse == "stop"))


def test_a_fault_is_reported_once_after_the_warm_up_or_ends_the_run(capsys):
    for values, message in (
        (COLLAPSED, "the embeddings have collapsed"),
        (HEALTHY | {"logit_min": -0.49 - SPAN}, "the embeddings have collapsed"),
        (AT_CHANCE, "nothing is being learned by step 70: recall@1 within a batch is 0.050, and"),
    ):
        health, stopping = watch("warn"), watch()
        for step in (50, 60, 70, 80):
            health.check(step, values)
        printed = capsys.readouterr().err  # Nothing by steps 50 and 60.
        assert printed.startswith(f"warning: {message}") and len(printed.splitlines()) == 1
        assert "by step 70" in printed
        stopping.check(60, values)
        with pytest.raises(UserError, match="train.on_collapse=stop"):
            stopping.check(70, values)
    healthy = HEALTHY | {"logit_min": -0.51 - SPAN}
    for reports in ([healthy] * 3, [AT_CHANCE, HEALTHY, COLLAPSED, AT_CHANCE]):
        health = watch()
        for i, values in enumerate(reports):  # A fault of a single report is none.
            health.check(60 + i, values)


def scores(untrained, final, **features):
    untrained = {"head": untrained, **features}
    return {
        "untrained": {part: {"recall@1": recall} for part, recall in untrained.items()},
        "final": {"head": {"recall@1": final}},
    }


def test_results_say_where_training_did_not_help(capsys):
    """On the images that choose the model, or compared with the features that the head got."""
    for validation, images in (((0.8, 0.9), ""), ((0.9, 0.8), "validation"), (None, "test")):
        held_out = {"validation": scores(*validation)} if validation else {}
        print_results({**scores(0.7, 0.6), **held_out}, load_config("glyphs"))
        printed = capsys.readouterr().err
        assert ("did not help" in printed) == bool(images)
        assert not images or f"of the head on the {images} images was" in printed
    config = load_config("folder:hyp-lite,frozen", ["data.path=photos"])
    for head, warned in ((0.6, True), (0.7, False)):
        print_results(scores(0.5, head, encoder=0.65), config)
        assert ("0.6500, and 0.6000 with the head" in capsys.readouterr().err) == warned


def test_results_say_where_validation_cannot_choose_and_where_the_test_was_better_before(capsys):
    for validation, final, warned in (
        ((0.9, 1), 0.9, (True, True)),
        ((0.8, 0.9), 1, (False, False)),
    ):
        results = {
            **scores(0.95, final),
            "validation": scores(*validation),
            "tied_steps": [50, 100],
        }
        print_results(results, load_config("glyphs"))
        printed = capsys.readouterr().err
        assert ("recall@1 is 1 at 2 validations, which cannot choose" in printed) == warned[0]
        assert ("0.9500 before training, and is 0.9000 with the final" in printed) == warned[1]


def test_a_tie_is_no_choice():
    for step, tied, text in (
        (200, [], "step 200, chosen on"),
        (0, [], "step 0, the model before training, chosen on"),
        (200, [0, 50, 200], "step 200; 3 steps from 0 to 200 tie on"),
    ):
        assert format_best_step({"best_step": step, "tied_steps": tied}).startswith(text)


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
