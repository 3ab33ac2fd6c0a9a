"""Runs on images and captions: interrupted, of two processes, and chosen among settings."""

import shlex

import numpy as np
import pytest

from hypjax import train
from hypjax.analysis.run_captions import search_captions
from hypjax.analysis.run_embeddings import open_runs
from hypjax.analysis.run_hits import search_test_images
from hypjax.config import load_config
from hypjax.runs.files import read_object
from tests.helpers import commands, small_runs
from tests.helpers.process_pair import ProcessPair
from tests.training.test_interruptions import assert_same_run

CONFIG = str(small_runs.REPOSITORY / "configs/captions.py")
VARIANT = f"{CONFIG}:hyp,features"
SHORT = [
    *("train.total_steps=6", "train.batch_size=9", "optim.warmup_steps=2", "eval.every=3"),
    *("run.log_every=1", "run.checkpoint_every=1", "run.report=False", "model.head_dim=4"),
    *("data.validation_classes=4", "data.test_classes=4", "optim.groups=()"),
]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Features of 40 images with two captions each, of which neighbours share one."""
    file, rng = tmp_path_factory.mktemp("pairs") / "pairs.npz", np.random.default_rng(0)
    images = rng.normal(size=(40, 6))
    texts = images @ rng.normal(size=(6, 5))
    vectors = np.concatenate([texts, np.repeat(texts[::2], 2, axis=0)])
    ids = np.tile(np.arange(40), 2)
    np.savez(file, features=np.tile(images, (2, 1)), text_features=vectors, ids=ids)
    return f"data.path={file}"


@pytest.fixture(scope="module")
def undisturbed(pairs, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("undisturbed") / "run"
    train.train_and_evaluate(load_config(VARIANT, [pairs, *SHORT]), workdir)
    return workdir


def test_an_interrupted_run_ends_bit_equal(pairs, undisturbed, tmp_path):
    config, run = load_config(VARIANT, [pairs, *SHORT]), tmp_path / "run"
    with small_runs.interrupted_after(4):
        train.train_and_evaluate(config, run)
    train.train_and_evaluate(config, run)
    assert_same_run(run, undisturbed, least=10)
    assert small_runs.step_metrics(run) == small_runs.step_metrics(undisturbed)


@pytest.mark.slow
def test_two_processes_have_the_loss_of_the_global_batch(pairs, undisturbed, tmp_path):
    """Of 9 pairs, one process has 5 and the other 4; each compares its own with all."""
    pair = ProcessPair(None, tmp_path / "run", pairs, *SHORT, config=VARIANT)
    for status, _, errors in pair.wait_for_both():
        assert status == 0, errors
    values = small_runs.step_metrics(tmp_path / "run")
    expected = small_runs.step_metrics(undisturbed)
    assert values.keys() == expected.keys() == set(range(1, 7))
    for step, numbers in expected.items():
        assert values[step] == pytest.approx(numbers, rel=1e-5)


def test_a_report_shows_searches_in_both_directions(undisturbed, tmp_path):
    """Misses are those of the results; a cone holds the image exactly if its angle is within."""
    where = f"--workdir={undisturbed}"
    commands.call("report", where, f"--output={tmp_path / 'report.html'}", "--queries=4", "--k=3")
    page = (tmp_path / "report.html").read_text()
    (opened,) = open_runs([undisturbed])
    result = search_test_images(opened, k=3)
    captions, images = search_captions(result, k=3), opened.splits.test
    scores = read_object(undisturbed / "results.json")["best"]["head"]
    for by, direction, searches in (
        ("captions", "text_to_image", captions.by_text),
        ("images", "image_to_text", captions.by_image),
    ):
        missed = sum(not search.right[0] for search in searches)
        assert 1 - missed / len(searches) == pytest.approx(scores[f"{direction}/recall@1"])
        assert f"Searches by {by}" in page and f"{missed} of {len(searches)} {by} have" in page
    for search in captions.by_text:  # The third text of two neighbours is of both.
        text = captions.texts[search.query]
        assert search.right == [text in images.captions[i] for i in search.hits]
        assert search.distances == sorted(search.distances)
    texts = opened.caption_points(result.params, images, result.space)
    radius = np.median(result.space.distance(texts, np.zeros_like(texts)))
    assert f"{radius:.3f} (" in captions.facts["radius of captions (10% to 90%)"]
    assert captions.facts["pairs with the image in the caption's cone"] in page


def test_settings_are_chosen_by_searches_for_words(pairs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    fields = (f"--config.{field}" for field in (pairs, *SHORT, "train.total_steps=3"))
    flags = [f"--config={CONFIG}", "--seeds=0", *fields]
    flags += ["--variant=hyp,features objective.entailment=0,0.2"]
    commands.call("tune", *flags, "--pending")
    runs = capsys.readouterr().out.splitlines()
    assert len(runs) == 2
    for arguments in runs:
        commands.call("main", *shlex.split(arguments))
    capsys.readouterr()
    commands.call("tune", *flags)
    printed = capsys.readouterr().out
    for images in ("validation", "test"):
        assert f"text_to_image/map of the head on the {images} images" in printed
