"""A run that an older version saved resumes here, and ends as it would have ended there.

The archive holds a small run (`tests.helpers.small_runs`) that was stopped after step 2, by the
version before objectives declared fields, and what the older version measured when nothing
stopped it.
"""

import json
import pathlib
import tarfile

import pytest

from hypjax import evaluate, train
from hypjax.data.splits import open_splits
from tests.helpers import small_runs

ARCHIVE = pathlib.Path(__file__).with_name("older_run.tar.xz")
FIELDS = ["model.width=8", "model.head_dim=4", "eval.every=0", "run.log_every=1"]


@pytest.mark.slow
def test_an_older_run_resumes_and_is_evaluated(photos_folder, tmp_path, capsys):
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    run = tmp_path / "older_run"
    expected = json.loads((run / "expected.json").read_text())
    saved = json.loads((run / "config.json").read_text())
    assert "model.drop_path" not in saved["identity"]
    # Files of equal pixels may have other bytes where another version of zlib compressed them.
    config = small_runs.load(photos_folder, *FIELDS)
    saved["identity"]["data.path"] = str(photos_folder)
    saved["circumstances"]["images"] = open_splits(config).fingerprint
    (run / "config.json").write_text(json.dumps(saved))

    assert evaluate.evaluate(config, run).keys() == {"step 2"}
    train.train_and_evaluate(small_runs.load(photos_folder, *FIELDS, "variant=hyp"), run)
    assert "continuing after step 2" in capsys.readouterr().err
    metrics = small_runs.step_metrics(run)
    assert sorted(metrics) == list(range(3, 13))
    for step, values in metrics.items():
        assert values == pytest.approx(expected["metrics"][str(step)], rel=1e-4)
    assert json.loads((run / "results.json").read_text()) == expected["results"]
