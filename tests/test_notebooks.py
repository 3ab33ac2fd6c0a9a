"""Notebooks run from top to bottom, at a size for tests."""

import json

import matplotlib
import pytest

from tests.helpers import small_runs


@pytest.mark.parametrize("name", ["glyphs"])
def test_notebook_runs(name, repository, data_dir, tmp_path, monkeypatch):
    matplotlib.use("Agg")
    monkeypatch.chdir(repository / "notebooks")
    overrides = repr([*small_runs.SHORT_GLYPHS, f"run.data_dir={data_dir}"])
    namespace = {}
    cells = json.loads((repository / f"notebooks/{name}.ipynb").read_text())["cells"]
    for cell in cells:
        if cell["cell_type"] == "code":
            source = "".join(cell["source"])
            source = source.replace("overrides = []", f"overrides = {overrides}")
            source = source.replace('root / "runs/notebook"', f"pathlib.Path({str(tmp_path)!r})")
            exec(source, namespace)
    assert (tmp_path / "neighbours.png").stat().st_size > 10_000
