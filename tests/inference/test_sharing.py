"""`hypjax.push` and `hypjax.load` through huggingface_hub, with a hub on this machine."""

import json

import huggingface_hub
import pytest

import hypjax
from hypjax.errors import UserError
from tests.helpers.fake_hub import FakeHub, serving
from tests.helpers.manual import programs

NAME = "me/photos"


@pytest.fixture
def fake_hub(tmp_path):
    with serving(tmp_path / "cache") as hub:
        yield hub


@pytest.fixture
def push(fake_hub, run, tmp_path):
    def push(**options):
        return hypjax.push(run, NAME, folder=tmp_path / "photos", **options)

    return push


def test_what_was_pushed_is_loaded_also_at_an_earlier_commit(fake_hub, push, run, capsys):
    folder = push()
    own = hypjax.load(run).fingerprint
    first, second = fake_hub.commits[NAME][-1], hypjax.load(NAME)
    assert second.fingerprint == own
    assert f"published {fake_hub.address}/{NAME}/commit/{first.oid}" in capsys.readouterr().err
    assert set(first.files) == {
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
    }
    # Another model, which has one file less, and another hash of its matches.
    saved = json.loads(first.files["hypjax.json"])
    for file in [name for name in saved["files"] if name.startswith("projections/")]:
        del saved["files"][file], first.files[file]
    fake_hub.commits[NAME].append(first._replace(oid=40 * "b"))
    changed = first.files | {"hypjax.json": json.dumps(saved).encode()}
    fake_hub.commits[NAME][-1] = first._replace(oid=40 * "b", files=changed)
    assert hypjax.load(NAME).fingerprint == own
    push()
    assert len(fake_hub.commits[NAME]) == 4
    assert set(fake_hub.commits[NAME][-1].files) > set(changed)
    at_commit = hypjax.load(f"hf://{NAME}@{40 * 'b'}")
    assert at_commit.source == f"hf://{NAME}@{40 * 'b'}" and at_commit.fingerprint == own
    with pytest.raises(UserError, match=f"the repository {NAME} has no revision v2"):
        hypjax.load(f"{NAME}@v2")
    fake_hub.close()
    assert hypjax.load(NAME).fingerprint == own  # From the cache.
    assert hypjax.load(f"{NAME}@{40 * 'b'}").fingerprint == own


def test_the_manuals_program_pushes_and_loads(fake_hub, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/glyphs-hyp").symlink_to(run)
    (program,) = programs("take-it-with-you.md", "The Hugging Face hub")
    found = {}
    exec(program, found)
    assert found["model"].fingerprint == hypjax.load(run).fingerprint
    assert fake_hub.private == {"OWNER/NAME"} and (tmp_path / "hub/NAME/README.md").exists()


def test_a_private_model_is_loaded_with_a_token_alone(fake_hub, push, run, monkeypatch):
    push(private=True)
    assert fake_hub.private == {NAME}
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(UserError, match=f"there is no repository {NAME} on the hub that you may"):
        hypjax.load(NAME)
    monkeypatch.setenv("HF_TOKEN", FakeHub.token)
    assert hypjax.load(NAME).fingerprint == hypjax.load(run).fingerprint


def test_a_file_that_is_not_the_models_is_refused(fake_hub, push):
    push()
    fake_hub.commits[NAME][-1].files["model.safetensors"] += b" "
    with pytest.raises(UserError, match="model.safetensors is not the file"):
        hypjax.load(NAME)


def test_the_hub_reads_the_scores_and_tags_from_the_card(push, run):
    data = huggingface_hub.ModelCard.load(push() / "README.md").data
    assert data.library_name == "hypjax" and data.pipeline_tag == "image-feature-extraction"
    assert data.tags == ["image-retrieval", "metric-learning", "timm"] and not data.base_model
    results = json.loads((run / "results.json").read_text())
    scores = {each.metric_type: each.metric_value for each in data.eval_results}
    assert scores == pytest.approx(results["best"]["head"], abs=1e-4)
    assert data.eval_results[0].dataset_type == "folder" and data.model_name == NAME
