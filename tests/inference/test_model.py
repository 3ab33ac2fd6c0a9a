"""Trained models in Python: `hypjax.load` and `hypjax.push`."""

import json
import shutil
import traceback

import flax.linen as nn
import huggingface_hub
import numpy as np
import pytest
from PIL import Image

import hypjax
from hypjax.config import default_config
from hypjax.errors import UserError
from hypjax.evaluate import evaluate
from hypjax.inference import model as models
from hypjax.runs.workdir import saved_config
from hypjax.system.files import check_json, with_checksum, write_json


@pytest.fixture(scope="module")
def model(run):
    return hypjax.load(run)


@pytest.fixture(scope="module")
def published(run, tmp_path_factory):
    return hypjax.push(run, "me/photos", folder=tmp_path_factory.mktemp("hub") / "photos")


@pytest.fixture(autouse=True)
def no_token(monkeypatch):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)


def test_all_forms_of_one_image_give_one_embedding(model, photos_folder):
    path = photos_folder / "class1/2.png"
    image = Image.open(path)
    pixels = np.asarray(image)
    one = model.embed(path)
    assert one.shape == (1, 8) and one.dtype == np.float32
    for form in (str(path), path.read_bytes(), image, pixels, pixels[None], [image, path, pixels]):
        actual = model.embed(form)
        np.testing.assert_allclose(actual, np.repeat(one, len(actual), axis=0), rtol=0, atol=1e-6)
    # Images in memory have no identity.
    hits = model.search([pixels, image], [image], k=np.int64(1))[0]
    assert hits.query == hits.paths[0] == "image 0" and hits.distances[0] < 1e-5


def test_other_objects_than_images_are_refused(model):
    for images, message in [
        (3, "int is no image"),
        (np.zeros((4, 4)), "features"),
        (np.zeros((4, 4, 5), np.uint8), r"\[height, width, 1 to 4\]"),
        ("nothing.jpg", "nothing.jpg"),
        ({"nothing.jpg"}, "set has no order"),
    ]:
        with pytest.raises(UserError, match=message):
            model.embed(images)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [("model.width", 10**9, "between 0 and "), ("data.std", [0.0, 1.0, 1.0], "above 0")],
)
def test_a_strangers_model_cannot_harm(published, tmp_path, name, value, message):
    """One sentence, before anything of that size is allocated or computed."""
    copy = shutil.copytree(published, tmp_path / "copy")
    saved = check_json(json.loads((copy / "hypjax.json").read_text()))
    unchanged = saved["all"][name]
    saved["all"] |= {name: value, "run.workers": 10**6}
    write_json(copy / "hypjax.json", with_checksum(saved))
    with pytest.raises(UserError, match=message):
        hypjax.load(copy, "encoder")
    saved["all"] |= {name: unchanged}
    write_json(copy / "hypjax.json", with_checksum(saved))
    assert hypjax.load(copy).config.run.to_dict() == default_config().run.to_dict()


def test_a_published_model_is_scored_in_its_own_space(run, published):
    config = saved_config(run)
    assert evaluate(config, published)["final"]["head"]
    config.objective.c = 0.7
    with pytest.raises(UserError, match=r"another configuration \(objective.c"):
        evaluate(config, published)


def test_a_model_of_features_takes_no_encoder(tmp_path):
    write_json(tmp_path / "config.json", {"all": {"model.architecture": "features"}})
    with pytest.raises(UserError, match="encoder of this model is features; .* or no encoder"):
        hypjax.load(tmp_path, encoder=nn.Dense(3))


def test_damaged_or_replaced_weights_are_refused(published, tmp_path, monkeypatch):
    copy = shutil.copytree(published, tmp_path / "copy")
    for name, changed in (("model.safetensors", -3), ("hypjax.json", 40)):
        content = (copy / name).read_bytes()
        damaged = bytearray(content)
        damaged[changed] ^= 1
        (copy / name).write_bytes(damaged)
        with pytest.raises(UserError, match=f"{name} is damaged"):
            hypjax.load(copy)
        (copy / name).write_bytes(content)
    restore = models.restore_best

    def replaced(folder, method):
        saved = check_json(json.loads((copy / "hypjax.json").read_text()))
        write_json(copy / "hypjax.json", with_checksum(saved | {"score_space": None}))
        return restore(folder, method)

    monkeypatch.setattr(models, "restore_best", replaced)
    with pytest.raises(UserError, match="was replaced meanwhile"):
        hypjax.load(copy)


def test_a_folder_without_a_model_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: str(tmp_path))
    for source, problem in (("runs/a", "does not exist"), ("me/other", "holds no model of hypjax")):
        with pytest.raises(UserError, match=f"{source} {problem}") as raised:
            hypjax.load(source)
        assert raised.value.__cause__ is raised.value.__context__ is None
        frames = traceback.extract_tb(raised.value.__traceback__)
        assert [frame.filename for frame in frames] == [__file__]
