"""All notebooks run from top to bottom, at a size for tests."""

import io
import json
import sys
import types

import papermill
import pytest
from IPython.core.inputtransformer2 import TransformerManager

from hypjax.data.preparation.export import export
from tests.helpers import small_runs

NOTEBOOKS = sorted((small_runs.REPOSITORY / "notebooks").glob("*.ipynb"))
GLYPHS = [
    *("model.width=32", "model.depth=1", "model.num_heads=2", "train.total_steps=6"),
    *("train.batch_size=24", "train.samples_per_class=2", "optim.warmup_steps=0", "eval.every=0"),
    "data.validation_classes=20",
]
OPTIONS = {
    "quickstart": GLYPHS,
    "first_photos": [field for field in small_runs.SMALL if "report" not in field],
    "paper_figures": [*GLYPHS, "run.report=False"],
    "hyperbolic_geometry": [],
    "own_loop": [],
}

# A kernel runs hypjax's commands itself: processes of their own would import JAX for each.
STARTUP = """
import glob
import shlex
from hypjax.geometry import layout
from tests.helpers import commands

def system(line):
    python, option, module, *words = shlex.split(get_ipython().var_expand(line, depth=1))
    assert (python, option) == ("python", "-m") and module.startswith("hypjax.")
    named = [sorted(glob.glob(word)) if "*" in word else [word] for word in words]
    commands.call(module.removeprefix("hypjax."), *sum(named, []))

get_ipython().system = system
# UMAP compiles for long; see geometry/test_layout.py.
layout.lay_out_by_umap = lambda *args, neighbours=15, **kwargs: layout.lay_out(*args, **kwargs)
layout._STEPS = 20  # Of hundreds, each slow without optimisations; see geometry/test_layout.py.
"""


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, data_dir, photos_folder, repository, folder, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(data_dir))
    monkeypatch.setenv("PYTHONPATH", str(repository))
    monkeypatch.setenv("IPYTHONDIR", str(folder / "ipython"))
    startup = folder / "ipython/profile_default/startup/commands.py"
    startup.parent.mkdir(parents=True)
    startup.write_text(STARTUP)
    if path.stem == "quickstart":  # After the commands of README.md.
        export("glyphs", folder / "letters", data_dir)
    parameters = {
        "first_photos": {"photos": str(photos_folder), "variant": "hyp-scratch"},
        "own_loop": {"steps": 5, "classes_per_batch": 8},
        "paper_figures": {"temperatures": [0.3]},
    }.get(path.stem, {})
    if OPTIONS[path.stem]:
        parameters["options"] = " ".join(f"--config.{field}" for field in OPTIONS[path.stem])
    output = folder / "executed.ipynb"
    seconds = 300 if OPTIONS[path.stem] else 60  # For a cell: kernels may miss a message.
    options = {"progress_bar": False, "start_timeout": 300, "execution_timeout": seconds}
    papermill.execute_notebook(path, output, parameters, cwd=folder, **options)
    executed = output.read_text()  # With the state of its widgets.
    # A command that fails does not stop a notebook.
    assert "error:" not in executed and "Traceback" not in executed
    assert '"image/png"' in executed


@pytest.mark.hygiene
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.parametrize("is_released", [True, False])
def test_colab_takes_the_repository_until_a_release(path, is_released, monkeypatch, capsys):
    """Colab's server lists the open notebook, with its address."""
    cells = json.loads(path.read_text())["cells"]
    cell = next("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    opened = "fileId=https%3A//github.com/someone/hypjax/blob/main/notebooks/a.ipynb"
    sessions = json.dumps([{"path": opened}]).encode()
    monkeypatch.setattr("urllib.request.urlopen", lambda address: io.BytesIO(sessions))
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: is_released or None)
    monkeypatch.setitem(sys.modules, "google.colab", types.ModuleType("google.colab"))
    names, lines = {}, []

    def system(line):
        lines.append(line.format(**names))

    names["get_ipython"] = lambda: types.SimpleNamespace(system=system)
    exec(TransformerManager().transform_cell(cell), names)
    install, repository = 'pip install -q "hypjax[viz]', "git+https://github.com/someone/hypjax"
    again = [] if is_released else [f'{install} @ {repository}"']
    assert lines == [f'{install}"', *again]
    assert (repository in capsys.readouterr().out) != is_released


@pytest.mark.hygiene
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_no_outputs_and_asks_nothing(path):
    for cell in json.loads(path.read_text())["cells"]:
        assert not cell.get("outputs") and not cell.get("execution_count")
        assert "input(" not in "".join(cell["source"])
