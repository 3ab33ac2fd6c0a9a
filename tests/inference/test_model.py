"""One line of Python: `hypjax.load`, `hypjax.push`, and what they give."""

import json
import pathlib
import shutil
from unittest import mock

import huggingface_hub
import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file, save_file

import hypjax
from hypjax.config import default_config
from hypjax.data.splits import open_splits
from hypjax.errors import UserError
from hypjax.geometry import PoincareBall
from hypjax.inference.matches import match_distance, read_matches
from hypjax.integrations.hub import without_paths
from hypjax.retrieval.refinement import Refinement
from hypjax.retrieval.scores import Score
from hypjax.runs.files import read_results
from hypjax.runs.workdir import saved_config
from hypjax.system import files as system_files
from tests.helpers import commands, small_runs
from tests.helpers.fake_hub import Commit, FakeHub, serving


@pytest.fixture(scope="module")
def model(run):
    return hypjax.load(run)


@pytest.fixture(scope="module")
def published(run, tmp_path_factory):
    return hypjax.push(run, "me/photos", folder=tmp_path_factory.mktemp("hub") / "photos")


@pytest.fixture
def copy(published, tmp_path):
    return shutil.copytree(published, tmp_path / "copy")


@pytest.fixture(autouse=True)
def no_token(monkeypatch):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)


def test_embeds_as_the_command_does(model, run, photos_folder, tmp_path):
    output = f"--output={tmp_path / 'g.npz'}"
    commands.call("embed", f"--workdir={run}", f"--images={photos_folder}", output)
    with np.load(tmp_path / "g.npz") as written:
        vectors, ids = written["vectors"], written["ids"].tolist()
    assert np.array_equal(model.embed(str(photos_folder)), vectors)
    assert np.array_equal(model.embed(ids[:20]), vectors[:20])
    (hits,) = model.search(str(tmp_path / "g.npz"), ids[3], k=4)
    assert hits == model.search(photos_folder, pathlib.Path(ids[3]), k=4)[0]
    assert ids[3] not in hits.paths and hits.label == "class0"
    assert str(hits).startswith(str(ids[3]))


def test_few_images_are_embedded_in_programs_of_a_power_of_two(run, photos_folder):
    model = hypjax.load(run)
    gallery = model.gallery(photos_folder)
    for count in (1, 3, 16, 19):
        points = model.embed(gallery.ids[:count].tolist())
        np.testing.assert_allclose(points, gallery.vectors[:count], rtol=0, atol=1e-6)
    assert {size for _, size in model._compiled} == {1, 4, 16}
    # What each search of a gallery needs is kept with it.
    first = model.search(gallery, gallery.ids[3], k=4)
    with mock.patch.object(Score, "factors", autospec=True, side_effect=Score.factors) as factors:
        assert model.search(gallery, gallery.ids[3], k=4) == first
    assert all(len(call.args[1]) <= 4 for call in factors.call_args_list)  # Of the query alone.


def test_all_forms_of_one_image_give_one_embedding(model, photos_folder):
    path = photos_folder / "class1/2.png"
    image = Image.open(path)
    pixels = np.asarray(image)
    one = model.embed(path)
    assert one.shape == (1, 8) and one.dtype == np.float32
    forms = [
        str(path),
        path.read_bytes(),
        image,
        pixels,
        [pixels],
        pixels[None],
        [image, path, pixels],
    ]
    for form in forms:
        found = model.embed(form)
        np.testing.assert_allclose(found, np.repeat(one, len(found), axis=0), rtol=0, atol=1e-6)
    assert len(model.embed([image] * 37)) == 37


@pytest.mark.parametrize("mode", ["P", "RGBA", "I;16"])
def test_images_in_memory_are_read_as_their_files(model, mode, tmp_path):
    values = np.random.default_rng(0).integers(0, 255, (30, 20, 3)).astype(np.uint8)
    image = Image.fromarray(values)
    if mode == "I;16":
        image = Image.fromarray(values[..., 0].astype(np.uint16) * 256)
    image = image.convert(mode)
    image.getexif()[0x0112] = 6  # To be turned by 90 degrees.
    path = tmp_path / "image.tiff"
    image.save(path, exif=image.getexif())
    assert np.array_equal(model.embed(image), model.embed(path))


def test_what_is_no_image_is_refused(model):
    for images, message in [
        ([], "no images"),
        (3, "int is no image"),
        (np.zeros((4, 4)), "features"),
        (np.zeros((4, 4, 2), np.uint8), "1, 3 or 4 channels"),
        ("nothing.jpg", "nothing.jpg"),
        (__file__, "test_model.py"),
    ]:
        with pytest.raises(UserError, match=message):
            model.embed(images)


def test_images_in_memory_are_not_taken_for_one_another(model, photos_folder):
    images = [Image.open(photos_folder / f"class{i}/0.png") for i in range(3)]
    first, _, last = model.search(images, images, k=2)
    assert first.query == first.paths[0] == "image 0" and first.distances[0] == 0
    assert last.paths[0] == "image 2"


def test_a_nearest_hit_beyond_the_matches_is_told(model, run, published, photos_folder):
    """The distance is that of 95% of the validation images, found here one by one."""
    images = open_splits(saved_config(run)).validation
    points = model.embed([images.name(i) for i in range(len(images))])
    nearest = []
    for i, label in enumerate(images.labels):
        (alike,) = np.nonzero(images.labels == label)
        distances = [model.space.distance(points[i], points[j]) for j in alike if j != i]
        nearest.append(min(map(float, distances)))
    (distance,) = [m.distance for f, m in read_matches(run).items() if f == model.fingerprint]
    assert len(nearest) == 18 and distance == pytest.approx(max(nearest), rel=1e-3)

    queries = [np.full((20, 20, 3), grey, np.uint8) for grey in (0, 255)]
    queries += sorted(photos_folder.glob("class*/0.png"))
    remarks = []
    for source in (model, hypjax.load(published)):
        remarks.append([])
        for hits in source.search(photos_folder, queries, k=1):
            assert bool(hits.remark) == (hits.distances[0] > distance)
            assert hits.remark in ("", str(hits).splitlines()[-1])
            remarks[-1].append(hits.remark)
    assert remarks[0] == remarks[1] and len({*remarks[0]}) == 2
    assert max(remarks[0]).startswith("perhaps no match: 95% of the validation images with a match")
    expanded = model.search(photos_folder, queries, 1, Refinement(expansion=1))
    assert not any(hits.remark for hits in expanded)


def test_too_few_queries_with_a_match_say_nothing(tmp_path):
    assert read_matches(tmp_path) == {}
    few = np.zeros((9, 2), np.float32)
    assert match_distance(few, np.zeros(9), None, None, space=PoincareBall()) is None


def test_a_published_folder_gives_the_same_embeddings_and_tells_no_paths(
    run, published, photos_folder
):
    for part in ("head", "encoder"):
        own, other = hypjax.load(run, part), hypjax.load(published, part, batch_size=16)
        assert np.array_equal(own.embed(photos_folder), other.embed(photos_folder))
        assert own.fingerprint == other.fingerprint
    assert {path.name for path in published.iterdir()} == {
        *("README.md", "config.json", "hypjax.json", "model.safetensors"),
        *("matches.json", "projections", "results.json"),
    }
    card = (published / "README.md").read_text()
    assert 'hypjax.load("me/photos")' in card and '"hf-hub:me/photos"' in card
    results = json.loads((run / "results.json").read_text())
    assert f"{results['final']['head']['recall@1']:.4f}" in card
    everything = card + (published / "hypjax.json").read_text()
    assert str(photos_folder.parent) not in everything and photos_folder.name in everything
    assert '"run.' not in everything


def test_of_paths_the_last_name_is_published():
    for weights, kept in [
        ("vit_small_patch16_224.dino", "vit_small_patch16_224.dino"),
        ("hf-hub:owner/name", "hf-hub:owner/name"),
        ("/home/me/w.safetensors", "w.safetensors"),
        ("https://host/me/w.npz?token=x/y", "w.npz"),
        (r"C:\Users\me\w.pth", "w.pth"),
    ]:
        fields = without_paths(small_runs.load("gs://bucket/me/birds", f"model.weights={weights}"))
        assert (fields.model.weights, fields.data.path) == (kept, "birds")


def test_without_a_token_there_is_a_folder_and_a_sentence(run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert hypjax.push(run, "me/photos") == pathlib.Path("hub/photos")
    assert hypjax.load("hub/photos").fingerprint == hypjax.load(run).fingerprint
    told = capsys.readouterr().err
    assert "wrote hub/photos, but did not upload it: there is no token for the hub" in told


def test_uploads_what_it_wrote_and_nothing_else(run, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: FakeHub.token)
    folder, copy = tmp_path / "a", shutil.copytree(run, tmp_path / "run")
    (copy / "projections/head-x.npz").write_text("secret")
    with serving(tmp_path / "cache") as hub:
        before = {"model.safetensors": b"", "head.safetensors": b"", "LICENSE": b""}
        hub.commits["me/photos"] = [Commit(40 * "0", before)]
        hypjax.push(copy, "me/photos", folder=folder)
        (projection,) = (folder / "projections").iterdir()
        assert hub.commits["me/photos"][-1].files.keys() == {
            *("LICENSE", "README.md", "config.json", "hypjax.json", "matches.json"),
            *("model.safetensors", f"projections/{projection.name}", "results.json"),
        }
    (folder / "LICENSE").write_text("mine")
    with pytest.raises(UserError, match="holds LICENSE"):
        hypjax.push(copy, "me/photos", folder=folder)


def test_a_push_into_the_folder_of_a_run_is_refused(run):
    before = {path.name: path.stat().st_mtime_ns for path in run.iterdir()}
    with pytest.raises(UserError, match="no part of a model"):
        hypjax.push(run, "me/photos", folder=run)
    assert before == {path.name: path.stat().st_mtime_ns for path in run.iterdir()}


@pytest.mark.parametrize("killed_after", [False, True])
def test_a_killed_push_leaves_the_old_model_or_the_new_one(
    published, tmp_path, monkeypatch, killed_after
):
    """The other has another curvature and no results."""
    folder, other = (shutil.copytree(published, tmp_path / name) for name in ("folder", "other"))
    saved = json.loads((other / "hypjax.json").read_text())
    saved["all"]["objective.c"] = saved["identity"]["objective.c"] = 1.0
    del saved["files"]["results.json"]
    (other / "hypjax.json").write_text(json.dumps(saved))
    (other / "results.json").unlink()
    before, after = (hypjax.load(each).fingerprint for each in (folder, other))
    exchange = system_files._exchange

    def killed(new, old):
        if killed_after:
            exchange(new, old)
        raise KeyboardInterrupt

    monkeypatch.setattr(system_files, "_exchange", killed)
    with pytest.raises(KeyboardInterrupt):
        hypjax.push(other, "me/photos", folder=folder)
    assert hypjax.load(folder).fingerprint == (after if killed_after else before)
    assert (read_results(folder / "results.json") is None) == killed_after


def test_what_holds_no_model_is_an_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: str(tmp_path))
    for source, message in [
        ("hf://photos", "write hf://OWNER/NAME"),
        ("runs/a", "runs/a holds no run"),
        ("me/other", "me/other holds no model of hypjax"),
    ]:
        with pytest.raises(UserError, match=message):
            hypjax.load(source)


def test_a_damaged_folder_is_an_error(copy):
    (copy / "results.json").write_text("{}")
    with pytest.raises(UserError, match="results.json is not the file"):
        hypjax.load(copy)
    (copy / "model.safetensors").unlink()
    with pytest.raises(UserError, match="model.safetensors .No such file"):
        hypjax.load(copy)


def of_field(name, value):
    """Sets a field in hypjax.json."""

    def change(folder):
        saved = json.loads((folder / "hypjax.json").read_text())
        saved["all"][name] = value
        (folder / "hypjax.json").write_text(json.dumps(saved))

    return change


def of_weights(**arrays):
    """Sets weights, but not their hash."""

    def change(folder):
        state = load_file(folder / "model.safetensors")
        save_file(state | arrays, folder / "model.safetensors")

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (of_field("model.width", 10**9), "must be between 0 and "),
        (of_field("eval.scales", [float("nan")]), "a finite number"),
        (of_field("data.std", [0.0, 1.0, 1.0]), "above 0"),
        (of_weights(pos_embed=np.ones((1, 10, 16), np.float32)), "pos_embed has the shape 1×10×16"),
        (of_weights(**{"head.weight": np.ones((8, 16), int)}), "the head has other parameters"),
    ],
)
def test_a_strangers_model_cannot_harm(copy, change, message):
    """One sentence, before anything of that size is allocated or computed."""
    saved = json.loads((copy / "hypjax.json").read_text())
    del saved["files"]
    (copy / "hypjax.json").write_text(json.dumps(saved))
    change(copy)
    with pytest.raises(UserError, match=message):
        hypjax.load(copy, "encoder")


def test_how_a_published_model_is_executed_is_not_its_choice(copy):
    for name, value in {"run.workers": 10**6, "run.cache_dir": "/", "run.new": None}.items():
        of_field(name, value)(copy)
    assert hypjax.load(copy).config.run.to_dict() == default_config().run.to_dict()
