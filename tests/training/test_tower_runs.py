"""Runs that fine-tune both towers of a model of images and texts on captions."""

import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
from PIL import Image

import hypjax
from hypjax import evaluate, train
from hypjax.assemble import assemble_learner, assemble_method, saved_method
from hypjax.config import load_config, recipes
from hypjax.errors import UserError
from hypjax.experiment.trained import restore_best
from hypjax.geometry import Sphere, learned
from hypjax.inference import released as released_models
from hypjax.inference.pretrained import starting_parameters
from hypjax.runs.workdir import saved_config
from hypjax.training.lowering import assumed_sizes, lower_step
from tests.helpers import commands, small_runs
from tests.helpers.process_pair import ProcessPair
from tests.helpers.texts import released, write_tokenizer
from tests.training.test_interruptions import assert_same_run

CONFIG = str(small_runs.REPOSITORY / "configs/captions.py")
COLOURS = "red", "green", "blue", "white", "black", "grey"
SHORT = [
    *("train.total_steps=8", "train.batch_size=6", "optim.warmup_steps=1", "eval.every=0"),
    *("run.log_every=1", "run.checkpoint_every=1", "run.report=False", "run.cache=none"),
    *("data.validation_classes=0", "data.test_classes=2", "optim.learning_rate=3e-3"),
]


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A folder with photos.csv and a converted model in meru/."""
    folder, rng = tmp_path_factory.mktemp("towers"), np.random.default_rng(0)
    rows = ["path,caption,label"]
    for colour in COLOURS:
        for i in range(3):
            pixels = np.array(Image.new("RGB", (32, 32), colour))
            pixels = np.clip(pixels + rng.normal(0, 9, pixels.shape), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"{colour}{i}.png")
            rows.append(f"{colour}{i}.png,{'the a my'.split()[i]} {colour},{colour}")
    (folder / "photos.csv").write_text("\n".join(rows))
    convert(released(), folder / "meru")
    return folder


def convert(model, folder):
    """Writes a released model as `hypjax.convert --format=hypjax` does."""
    (folder.parent / "m.pth").write_bytes(b"weights")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(released_models, "read_language_image", lambda _: model)
        tokenizer = str(write_tokenizer(folder.parent))
        released_models.save_released(str(folder.parent / "m.pth"), folder, tokenizer)


def configured(here, *overrides, space=""):
    fields = f"data.path={here / 'photos.csv'}", *SHORT, *overrides
    return load_config(f"{CONFIG}:{space}towers={here / 'meru'}", fields)


@pytest.fixture(scope="module")
def trained(here):
    train.train_and_evaluate(configured(here), here / "run")
    return here / "run"


def parameters(folder):
    return restore_best(folder, saved_method(folder)).params


def changed(before, after):
    """Names of parameters that differ."""
    before, after = (
        dict(jax.tree_util.tree_leaves_with_path({k: x for k, x in p.items() if k != "scalars"}))
        for p in (before, after)
    )
    assert before.keys() == after.keys()
    different = (k for k in before if not np.array_equal(before[k], after[k]))
    return {jax.tree_util.keystr(k, simple=True, separator="/") for k in different}, len(before)


def test_a_model_starts_where_its_authors_left_it(here, trained):
    """The scores before training are those of the command `captions` on the same pairs."""
    results = json.loads((trained / "results.json").read_text())
    test = {*results["untrained"]["head"]}
    assert {"recall@1", "text_to_image/recall@1", "image_to_text/map"} <= test
    lines = (here / "photos.csv").read_text().splitlines()
    opened = hypjax.load(here / "meru")
    splits = train.assemble(configured(here)).splits
    names = {pathlib.Path(splits.test.name(i)).name for i in range(len(splits.test))}
    (here / "test.csv").write_text(
        "\n".join(lines[:1] + [x for x in lines if x.split(",")[0] in names])
    )
    commands.call(
        "captions",
        f"--workdir={here / 'meru'}",
        f"--pairs={here / 'test.csv'}",
        f"--output={here / 'scores.json'}",
    )
    scores = json.loads((here / "scores.json").read_text())
    for direction in ("text_to_image", "image_to_text"):
        for k in (1, 5):
            expected = scores[direction][f"recall@{k}"]
            assert results["untrained"]["head"][f"{direction}/recall@{k}"] == expected
    assert opened.space == released().space
    assert results["learned"]["untrained"] == pytest.approx({"c": 0.7, "temperature": 0.05})


def test_both_towers_learn(here, trained):
    names, count = changed(parameters(here / "meru"), parameters(trained))
    assert len(names) == count
    losses = [values[0] for values in small_runs.step_metrics(trained).values()]
    assert np.mean(losses[-2:]) < np.mean(losses[:2])


def test_a_trained_model_searches_by_words_wherever_it_is_moved(here, trained, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(trained, moved)
    model = hypjax.load(moved)
    gallery = model.gallery([str(here / f"{colour}0.png") for colour in COLOURS])
    (hits,) = model.search(gallery, text="the red", k=3)
    assert len(hits.paths) == 3
    scores = json.loads((moved / "results.json").read_text())["final"]["head"]
    weights = here / "meru"
    weights.rename(here / "elsewhere")
    try:
        again = evaluate.evaluate(saved_config(moved), moved)["final"]["head"]
    finally:
        (here / "elsewhere").rename(weights)
    assert again == pytest.approx(scores, abs=1e-6)


def test_an_interrupted_run_ends_bit_equal(here, trained, tmp_path):
    config, run = configured(here), tmp_path / "run"
    with small_runs.interrupted_after(3):
        train.train_and_evaluate(config, run)
    train.train_and_evaluate(config, run)
    assert_same_run(run, trained, least=10)


@pytest.mark.slow
def test_two_processes_have_the_loss_of_the_global_batch(here, trained, tmp_path):
    variant, fields = (
        f"{CONFIG}:towers={here / 'meru'}",
        (f"data.path={here / 'photos.csv'}", *SHORT),
    )
    pair = ProcessPair(None, tmp_path / "run", *fields, config=variant)
    for status, _, errors in pair.wait_for_both():
        assert status == 0, errors
    values, expected = map(small_runs.step_metrics, (tmp_path / "run", trained))
    assert values.keys() == expected.keys() == set(range(1, 9))
    for step, numbers in expected.items():
        assert values[step] == pytest.approx(numbers, rel=1e-4)


def test_adapters_change_the_kernels_of_both_towers_alone(here, tmp_path):
    config = configured(here, "train.lora_rank=2", "train.total_steps=2")
    train.train_and_evaluate(config, tmp_path / "run")
    names, _ = changed(parameters(here / "meru"), parameters(tmp_path / "run"))
    of_encoders = {name for name in names if "/encoder/" in f"/{name}"}
    assert all("block_0" in name and name.endswith("kernel") for name in of_encoders)
    assert {name.partition("/")[0] for name in of_encoders} == {"encoder", "towers_texts"}
    assert names - of_encoders == {"head/kernel", "towers_texts/head/kernel"}


def test_a_run_is_fine_tuned_further_in_another_space(here, trained):
    """The towers are the run's; its temperature, learned in one space, does not suit another."""
    fields = f"data.path={here / 'photos.csv'}", *SHORT
    config = load_config(f"{CONFIG}:hyp,towers={trained}", fields)
    assert (config.objective.space, config.objective.c) == ("poincare", 0.1)
    assert config.objective.entailment == 0.2 and config.model.text.max_norm == 0.4
    before = parameters(trained)
    start = starting_parameters(assemble_method(config))
    assert learned.scalar_values(start["scalars"]) == pytest.approx({"temperature": 0.07})
    assert changed(before, start)[0] == set()
    own = starting_parameters(assemble_method(load_config(f"{CONFIG}:towers={trained}", fields)))
    ends, starts = (learned.scalar_values(x["scalars"]) for x in (before, own))
    assert starts == pytest.approx(ends) and starts["temperature"] != 0.05


def test_published_losses_have_their_own_space_unless_the_model_has_it(here, trained):
    converted = saved_config(here / "meru").objective
    own = recipes.caption_towers(saved_config(trained), "hycoclip")
    assert own.train.sampling == "boxes" and own.objective.learn_c
    for name in ("clip_radius", "feature_scale", "c"):
        assert own.objective[name] == converted[name]
    assert recipes.caption_towers(own).train.sampling == "boxes"  # Fine-tuned further.
    lorentz, product = (recipes.caption_towers(own, space) for space in ("lorentz", "product"))
    lorentz.objective.clip_radius = 2.3
    meru = recipes.caption_towers(lorentz, "meru").objective
    assert (meru.clip_radius, meru.c, meru.learn_c) == (None, 1.0, True)
    phyclip = recipes.caption_towers(product, "phyclip").objective
    assert {*phyclip.parts} == {"lorentz"} and phyclip.summed
    assert len(phyclip.parts) == len(phyclip.curvatures) == 8


def test_cosines_start_from_the_scale_of_the_weights(here, tmp_path):
    """−d/τ is 2cos/τ and a constant. A SigLIP may have no head on images."""
    for head in ("linear", "none"):
        convert(released(Sphere(), head=head), tmp_path / head)
        fields = f"data.path={here / 'photos.csv'}", *SHORT
        config = load_config(f"{CONFIG}:towers={tmp_path / head}", fields)
        assert (config.objective.space, config.objective.temperature) == ("sphere", 2 / 20)
        assert config.objective.entailment == 0 and not config.objective.learn_c
        start = starting_parameters(assemble_method(config))
        assert changed(parameters(tmp_path / head), start)[0] == set()
        for space in ("hyp", "product", "sph"):
            load_config(f"{CONFIG}:{space},towers={tmp_path / head}", fields)


def test_a_dry_run_lowers_the_step_from_shapes(here):
    learner = assemble_learner(configured(here))
    text = lower_step(learner, assumed_sizes(learner, 6, 2)).as_text()
    assert "tensor<6x20xi32>" in text and "tensor<6x6xi1>" in text


def test_phrases_are_tokens_too(here, trained, tmp_path):
    """Their entailment is added to the loss of the same first step."""
    config = configured(here, "objective.phrases=0.5", "train.total_steps=1")
    train.train_and_evaluate(config, tmp_path / "run")
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    (share,) = (x["entailed_phrases"] for x in map(json.loads, lines) if "entailed_phrases" in x)
    (loss, *_), (without, *_) = (small_runs.step_metrics(x)[1] for x in (tmp_path / "run", trained))
    assert loss > without or share == 1


@pytest.mark.parametrize("space", ["hycoclip", pytest.param("phyclip", marks=pytest.mark.slow)])
def test_boxes_are_trained_on_beside_their_images(here, tmp_path, space):
    """An interrupted run ends bit-equal."""
    lines = (here / "photos.csv").read_text().splitlines()
    rows = [f'{x.split(",")[0]},{i},{x.split(",")[2]},"0,{i},20,30"' for i, x in enumerate(lines)]
    (here / "boxes.csv").write_text(
        "\n".join([f"{lines[0]},box", *(f"{x}," for x in lines[1:]), *rows[1:]])
    )
    table = f"data.path={here / 'boxes.csv'}", "model.head_dim=8", "train.total_steps=4"
    config = configured(here, *table, space=f"{space},")
    train.train_and_evaluate(config, tmp_path / "whole")
    with small_runs.interrupted_after(2):
        train.train_and_evaluate(config, tmp_path / "parts")
    train.train_and_evaluate(config, tmp_path / "parts")
    assert_same_run(tmp_path / "parts", tmp_path / "whole", least=10)


def test_mistakes_are_one_sentence(here, photos_folder, tmp_path):
    for variant, overrides, sentence in (
        ("towers=nothing", (), "names no folder of a model .*hypjax.convert"),
        ("lorenz,towers=meru", (), "did you mean lorentz,towers=FOLDER"),
        (f"towers={here / 'meru'}", ["model.text.num_heads=4"], "num_heads is 4, but 2 in"),
        (f"towers={here / 'meru'}", ["train.head_warmup_steps=1"], "no encoder of texts"),
        (f"towers={here / 'meru'}", ["data.captions=none.txt"], "none.txt"),
    ):
        with pytest.raises(UserError, match=sentence):
            fields = f"data.path={here / 'photos.csv'}", *SHORT, *overrides
            train.train_and_evaluate(load_config(f"{CONFIG}:{variant}", fields), tmp_path / "run")
    bare = tmp_path / "bare"
    shutil.copytree(here / "meru", bare)
    (bare / "bpe_simple_vocab_16e6.txt.gz").unlink()
    fields = f"data.path={here / 'photos.csv'}", *SHORT
    with pytest.raises(UserError, match="bare has no tokenizer; convert"):
        train.train_and_evaluate(load_config(f"{CONFIG}:towers={bare}", fields), tmp_path / "run")
