"""A run whose test images are judged: trained, shown again, evaluated in other ways, compared."""

import pytest

from hypjax.config import load_config
from hypjax.data.preparation import fonts, scenes
from hypjax.data.preparation.prepare import prepare
from hypjax.evaluate import evaluate
from hypjax.training import train
from tests.helpers import commands

TINY = (
    *("model.weights=None", "model.width=16", "model.depth=1", "model.num_heads=2"),
    *("data.validation_classes=2", "train.tuples.pool=40", "train.tuples.negatives=2"),
    *("train.batch_size=8", "train.total_steps=2", "optim.warmup_steps=0", "run.log_every=1"),
)
NAMES = [f"scenes/{level}/map" for level in ("easy", "medium", "hard")]


@pytest.mark.slow
def test_a_judged_run_is_trained_shown_evaluated_and_compared(tmp_path, monkeypatch, capsys):
    chosen = scenes.choose_objects(fonts.glyph_classes())
    few = {part: objects[:8] for part, objects in chosen.items()}
    monkeypatch.setattr(scenes, "choose_objects", lambda classes: few)
    prepare("scenes", data_dir=str(tmp_path / "data"))
    fields, run = [*TINY, f"run.data_dir={tmp_path / 'data'}"], tmp_path / "run"
    config = load_config("scenes:irt-r", fields)
    results = train.train_and_evaluate(config, run)
    final = results["final"]["head"]
    assert len(final) == 3 * 4 and {*NAMES, "scenes/hard/mp@10"} <= final.keys()
    assert results["validation"]["final"]["head"].keys() >= {"recall@1", "map", "mp@10"}
    shown = capsys.readouterr().out
    rows = [line.split() for line in shown.splitlines() if line.startswith("final")]
    assert ["final", "head", "scenes", "medium", f"{final[NAMES[1]]:.4f}"] in [r[:5] for r in rows]

    assert train.train_and_evaluate(config, run) == results
    assert "holds this run's results already" in capsys.readouterr().out
    fields += ["eval.scales=1,0.5", "eval.pca.encoder=4", "eval.whiten=True"]
    fields += ["eval.expansion=2", "eval.rerank=True", "eval.metrics=recall"]
    other = evaluate(load_config("scenes:irt-r", fields), run)["final"]["encoder"]
    assert list(other) == NAMES  # By mAP, since recall alone was asked for.
    assert other != {name: results["final"]["encoder"][name] for name in NAMES}

    capsys.readouterr()
    commands.call("compare", run, run)
    compared = capsys.readouterr().out
    assert "scores on the test images" in compared and "scenes  hard" in compared
