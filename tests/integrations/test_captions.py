"""Heads on images and captions: batches, a run that is interrupted, searches by words."""

import dataclasses
import itertools
import json

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

import hypjax
from hypjax import dry_run, train
from hypjax.assemble import assemble_training, choose_dataset, saved_experiment
from hypjax.config import load_config
from hypjax.data.phrases import parents
from hypjax.errors import UserError
from hypjax.evaluate import score_queries
from hypjax.experiment.captions import caption_facts
from hypjax.integrations import hub
from hypjax.runs.workdir import require_provenance, saved_text_encoder
from hypjax.training.input import open_input
from hypjax.training.states import first_state
from hypjax.types import POSITIVES, TEXT_ENCODER, TEXTS
from tests.helpers import commands, sentences, small_runs

pytest.importorskip("onnx", reason="needs the onnx extra: onnx")
pytest.importorskip("onnxruntime", reason="needs the onnx extra: onnxruntime")

WORDS = ("red", "blue", "green", "gold"), ("round", "flat"), ("stone", "leaf")
KINDS = [f"a {' '.join(words)}" for words in itertools.product(*WORDS)]
OTHERS = [text.removeprefix("a ") for text in KINDS]
ROWS = len(KINDS) * 9
SHORT = [
    *("train.total_steps=40", "train.batch_size=32", "optim.warmup_steps=2", "eval.every=8"),
    *("run.log_every=2", "run.checkpoint_every=3", "run.report=False", "model.head_dim=6"),
    *(
        "data.validation_classes=2",
        "data.test_classes=3",
        "optim.learning_rate=0.03",
        "optim.groups=()",
    ),
]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Features of 16 kinds with 8 images each, and their captions: two of every first image."""
    folder = tmp_path_factory.mktemp("captions")
    encoder, rng = sentences.write_encoder(folder / "encoder"), np.random.default_rng(0)
    texts = [text for text in KINDS for _ in range(9)]
    vectors = np.stack([*map(sentences.expected, texts)])
    images = vectors @ rng.normal(size=(sentences.DIM, 10)) + 0.1 * rng.normal(size=(ROWS, 10))
    images[::9] = images[1::9]
    ids = [f"{row // 9}-{max(row % 9, 1)}" for row in range(ROWS)]  # Rows 0 and 1 are one image.
    texts[::9] = OTHERS
    labels = [text.replace(" ", "-") for text in KINDS for _ in range(9)]
    np.savez(folder / "pairs.npz", features=images, texts=texts, ids=ids, labels=labels)
    return [f"data.path={folder / 'pairs.npz'}", f"model.text.encoder=onnx:{encoder}"]


def config_of(pairs, variant="hyp", *overrides):
    return load_config(f"configs/captions.py:{variant},features", [*pairs, *SHORT, *overrides])


def test_a_batch_marks_all_texts_that_describe_an_image(pairs):
    built = assemble_training(config_of(pairs))
    state = first_state(built.learner, built.sizes)
    source = open_input(built, range(2), state.params["model"])
    batches = [*source.batches(range(2), built.plans)]
    captions, vectors = built.images.captions, built.experiment.texts
    for batch in batches:
        owned, rows = [captions[i] for i in batch.ids], batch.inputs[TEXTS]
        drawn = [next(x for x in KINDS + OTHERS if np.array_equal(vectors[x], row)) for row in rows]
        expected = [[text in own for text in drawn] for own in owned]
        assert np.diag(expected).all()  # Each image's vector is of one of its captions.
        np.testing.assert_array_equal(batch.inputs[POSITIVES], expected)
    (again,) = source.batches(range(1, 2), built.plans)  # As after a restart.
    jax.tree.map(np.testing.assert_array_equal, again, batches[1])


def test_a_batch_has_a_phrase_of_each_caption(pairs):
    built = assemble_training(config_of(pairs, "hyp", "objective.phrases=0.2"))
    state = first_state(built.learner, built.sizes)
    vectors, captions = built.experiment.texts, built.images.captions
    for batch in open_input(built, range(2), state.params["model"]).batches(range(2), built.plans):
        rows = batch.inputs[TEXTS]
        assert rows.shape == (len(batch.ids), 2, sentences.DIM)
        for i, (caption, phrase) in zip(batch.ids, rows, strict=True):
            drawn = [text for text in captions[i] if np.array_equal(vectors[text], caption)]
            above = [*parents(drawn[0]), *([] if parents(drawn[0]) else drawn)]
            assert any(np.array_equal(vectors[text], phrase) for text in above)


@pytest.fixture(scope="module")
def run(pairs, tmp_path_factory):
    """A run that is interrupted and resumed."""
    workdir, config = tmp_path_factory.mktemp("runs") / "run", config_of(pairs)
    with small_runs.interrupted_after(8):
        train.train_and_evaluate(config, workdir)
    train.train_and_evaluate(config, workdir)
    return workdir


def test_a_resumed_run_ends_like_another(run, pairs, tmp_path):
    train.train_and_evaluate(config_of(pairs), tmp_path / "run")
    results = [json.loads((x / "results.json").read_text()) for x in (run, tmp_path / "run")]
    assert results[0] == results[1]
    scores = results[0]["final"]["head"]
    names = [f"{x}/{y}" for x in ("text_to_image", "image_to_text") for y in ("map", "recall@1")]
    assert {*names, "recall@1"} <= {*scores} and "text_to_image/map" not in results[0]["final"][
        "encoder"
    ]
    before = results[0]["untrained"]["head"]
    assert scores["text_to_image/map"] > before["text_to_image/map"] + 0.05
    assert results[0]["learned"]["final"]["temperature"] != 0.07


def test_queries_have_the_classes_of_their_texts(run):
    scores, classes = score_queries(run)
    assert scores["text_to_image/map"].shape == classes.shape
    assert len(np.unique(classes)) * 2 == len(classes)  # Two texts describe each class.


def test_a_run_keeps_its_pairs_and_encoder(run, tmp_path, monkeypatch):
    experiment = saved_experiment(run)
    require_provenance(run, experiment.image_provenance)
    test = experiment.splits.test
    captions = test.captions.copy()
    captions[[0, -1]] = captions[[-1, 0]]
    swapped = experiment.splits._replace(test=dataclasses.replace(test, captions=captions))
    with pytest.raises(UserError, match="the captions have changed since"):
        require_provenance(run, caption_facts(swapped, None))
    with pytest.raises(
        UserError, match="the encoder of texts, or its tokenizer, has changed since"
    ):
        require_provenance(run, {TEXT_ENCODER: "other"})
    model = hypjax.load(run)
    model._text_encoder = "other"
    with pytest.raises(UserError, match="is not the encoder of texts that the model was trained"):
        model.embed_texts("a red leaf")
    published = []
    monkeypatch.setattr(hub, "_model_card", lambda *_: "")
    monkeypatch.setattr(hub, "write_model", lambda *arguments: published.append(arguments[2]))
    hub.push(run, "me/words", folder=tmp_path / "hub")
    assert published[0][TEXT_ENCODER] == saved_text_encoder(run) is not None


def test_given_vectors_are_those_of_the_encoder(pairs, tmp_path):
    arrays = dict(np.load(pairs[0].removeprefix("data.path=")))
    vectors = np.stack([*map(sentences.expected, arrays["texts"].tolist())])
    file, overrides = tmp_path / "f.npz", [f"data.path={tmp_path / 'f.npz'}", pairs[1]]
    np.savez(file, **arrays, text_features=vectors)
    assert assemble_training(config_of(overrides)).experiment.texts
    for others in (vectors + 1, vectors[:, :3]):
        np.savez(file, **arrays, text_features=others)
        with pytest.raises(UserError, match="did not make the array text_features; leave out"):
            assemble_training(config_of(overrides))


def test_words_find_images(run, pairs, tmp_path):
    """Distances are those of the head and the encoder, in the space of the run."""
    arrays = np.load(pairs[0].removeprefix("data.path="))
    model = hypjax.load(run)
    assert model.takes_texts
    gallery = model.gallery(arrays["features"])
    (hits,) = model.search(gallery, text="a red flat leaf", k=5)
    head = model.params["towers_texts"]["head"]
    words = sentences.expected("a red flat leaf") @ head["kernel"] + head["bias"]
    words = words * 0.4 / (0.4 + np.linalg.norm(words))  # As model.text.max_norm says.
    distances = model.space.distance(model.space.embed(words), gallery.vectors)
    np.testing.assert_allclose(hits.distances, np.sort(distances)[:5], rtol=1e-4)
    np.savez(tmp_path / "f.npz", features=arrays["features"], ids=arrays["ids"])
    where, output = f"--workdir={run}", f"--output={tmp_path / 'g.npz'}"
    commands.call("embed", where, f"--images={tmp_path / 'f.npz'}", output)
    commands.call("search", where, f"--gallery={tmp_path / 'g.npz'}", "--text=a red flat leaf")


@pytest.mark.parametrize("variant", ["sph", "lorentz", "product"])
def test_each_space_learns(variant, pairs, tmp_path):
    weight = 0.0 if variant == "sph" else 0.2
    config = config_of(pairs, variant, "eval.every=0", f"objective.phrases={weight}")
    results = train.train_and_evaluate(config, tmp_path / "run")
    final, untrained = (results[x]["head"]["text_to_image/map"] for x in ("final", "untrained"))
    assert final > untrained


def test_a_dry_run_estimates_the_time(pairs, capsys):
    dry_run.dry_run(config_of(pairs))
    assert "40 steps take about" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["model.text.kind=clip"],
            "model.text.encoder is .*; it must be None unless model.text.kind",
        ),
        (["objective.name=proxy_anchor"], "max_norm is 0.4; it must be None unless objective.name"),
        (["objective.space=sphere"], "has no cones; leave out --config.objective.entailment"),
        (
            ["objective.space=sphere", "objective.entailment=0.0", "objective.phrases=0.1"],
            "has no cones; leave out --config.objective.phrases",
        ),
        (["model.text.width=7"], "model.text.width is 7; it must be 6, the dimension of the texts"),
        (["model.text.encoder=None"], "has texts, but no text_features; name an encoder"),
    ],
)
def test_mistakes_are_one_sentence(overrides, sentence, pairs, tmp_path):
    with pytest.raises(UserError, match=sentence):
        train.train_and_evaluate(config_of(pairs, "hyp", *overrides), tmp_path / "run")


@pytest.mark.parametrize("fields", [["train.lora_rank=2"], []], ids=["lora", "whole"])
def test_the_tower_of_images_learns_from_pairs_from_python(fields, pairs, tmp_path):
    """Adapters change a kernel by a matrix of their rank."""
    texts = [[text, text.removeprefix("a ")] for text in KINDS for _ in range(2)]
    images = np.random.default_rng(0).integers(0, 256, (len(texts), 16, 16, 3), np.uint8)
    sizes = ["model.architecture=vit", "model.width=16", "model.depth=1", "model.num_heads=2"]
    sizes += ["model.patch_size=8", "data.image_size=16", "data.resize=16", "model.weights=None"]
    trained = ["optim.frozen=()", "train.cached_features=False", *fields]
    short = [*SHORT, "train.total_steps=3", "train.batch_size=9", "eval.every=0", pairs[1]]
    config = load_config("configs/captions.py", ["data.path=x", *short, *sizes, *trained])
    train.train_and_evaluate(config, tmp_path, dataset=(images, texts))
    given = choose_dataset(config, (images, texts))
    built = assemble_training(config, given)
    before = first_state(built.learner, built.sizes).params["model"]["encoder"]
    after = hypjax.load(tmp_path).params["encoder"]
    path = next(x for x in flatten_dict(after) if "attention" in x[1] and x[-1] == "kernel")
    change = flatten_dict(after)[path] - flatten_dict(before)[path]
    assert np.linalg.matrix_rank(change, tol=1e-6) == 2 if fields else np.abs(change).max() > 1e-5
