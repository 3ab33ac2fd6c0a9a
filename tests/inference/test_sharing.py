"""`hypjax.push` and `hypjax.load` through huggingface_hub, with a hub on this machine."""

import json

import huggingface_hub
import pytest

import hypjax
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
