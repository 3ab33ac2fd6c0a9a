"""`hypjax.push` and `hypjax.load` through huggingface_hub, with a hub on this machine."""

import json

import huggingface_hub
import numpy as np
import pytest

import hypjax
from hypjax.config import load_config
from tests.helpers import small_runs
from tests.helpers.fake_hub import serving

NAME = "me/photos"


@pytest.fixture
def fake_hub(tmp_path):
    with serving(tmp_path / "cache") as hub:
        yield hub


def test_pushed_models_are_loaded_also_at_an_earlier_commit(
    fake_hub, run, photos_folder, tmp_path, capsys
):
    folder = hypjax.push(run, NAME, folder=tmp_path / "photos")
    texts = (folder / "README.md").read_text() + (folder / "hypjax.json").read_text()
    assert str(photos_folder.parent) not in texts and photos_folder.name in texts
    assert '"run.' not in texts
    data = huggingface_hub.ModelCard.load(folder / "README.md").data
    results = json.loads((run / "results.json").read_text())
    scores = {score.metric_type: score.metric_value for score in data.eval_results}
    assert scores == pytest.approx(results["best"]["head"], abs=1e-4)
    own = hypjax.load(run).fingerprint
    first = fake_hub.commits[NAME][-1].oid
    assert hypjax.load(NAME).fingerprint == own
    assert f"published {fake_hub.address}/{NAME}/commit/{first}" in capsys.readouterr().err
    hypjax.push(run, NAME, folder=folder)
    assert hypjax.load(f"hf://{NAME}@{first}").fingerprint == own
    fake_hub.close()
    assert hypjax.load(f"{NAME}@{first}").fingerprint == own  # From the cache.


@pytest.mark.parametrize("name", ["features", "captions"])
def test_heads_on_features_are_published(fake_hub, tmp_path, name):
    """Cards say what to embed; of an encoder of texts, the library and the file's name are kept."""
    file = tmp_path / "features.npz"
    arrays = dict(np.load(small_runs.write_features(file)))
    np.savez(file, **arrays, text_features=np.arange(300.0).reshape(60, 5) % 7)
    recipe, fields = "configs/features.py", []
    if name == "captions":
        recipe = "configs/captions.py:hyp,features"
        fields = ["train.samples_per_class=None", "optim.groups=()"]
    config = load_config(recipe, [*small_runs.SHORT_FEATURES, *fields, f"data.path={file}"])
    small_runs.save_untrained(config, run := tmp_path / "run")
    if name == "captions":
        run = small_runs.copy_with(
            run, tmp_path / "words", {"model.text.encoder": f"onnx:{tmp_path}/words.onnx"}
        )
    folder = hypjax.push(run, NAME, folder=tmp_path / "hub")
    card, model = (folder / "README.md").read_text(), hypjax.load(NAME)
    assert "model.embed(features)" in card and "one.jpg" not in card and str(tmp_path) not in card
    assert ("`onnx:words.onnx`" in card) == model.takes_texts == (name == "captions")
    expected, points = (x.embed(arrays["features"]) for x in (hypjax.load(run), model))
    np.testing.assert_array_equal(points, expected)
