"""All notebooks run from top to bottom, at a size for tests."""

import json
import pathlib
import re

import matplotlib
import pytest

from tests.helpers import small_runs

NOTEBOOKS = sorted((small_runs.REPOSITORY / "notebooks").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: pathlib.Path, data_dir, tmp_path, monkeypatch):
    """Notebooks name their overrides and workdir as below, so that a test can replace them."""
    matplotlib.use("Agg")
    monkeypatch.chdir(path.parent)
    overrides = repr([*small_runs.SHORT_GLYPHS, f"run.data_dir={data_dir}"])
    cells = json.loads(path.read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    namespace = {}
    for source in sources:
        source = source.replace("overrides = []", f"overrides = {overrides}")
        source = source.replace('root / "runs/notebook"', f"pathlib.Path({str(tmp_path)!r})")
        exec(source, namespace)
    for name in re.findall(r'savefig\(workdir / "([\w.]+)"', "".join(sources)):
        assert (tmp_path / name).stat().st_size > 10_000


def test_there_are_notebooks():
    assert NOTEBOOKS
