"""hypjax.main, run as a command."""

import json
import os
import subprocess
import sys

import pytest

from tests.helpers import small_runs


@pytest.fixture
def hypjax_main(repository, data_dir, tmp_path):
    def run(*args):
        return subprocess.run(
            [sys.executable, "-m", "hypjax.main", *args],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(repository)},
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run


@pytest.fixture
def glyphs(repository, data_dir):
    return [
        f"--config={repository}/configs/glyphs.py",
        *(f"--config.{override}" for override in small_runs.SHORT_GLYPHS),
        f"--config.run.data_dir={data_dir}",
    ]


def test_trains_prints_its_results_again_and_evaluates(hypjax_main, glyphs, tmp_path):
    first = hypjax_main(*glyphs, "--workdir=run")
    assert first.returncode == 0, first.stderr
    assert "Traceback" not in first.stderr
    phases = ("the run's folder is ", "evaluating before", "compiling the", "training until step 6")
    lines = iter(first.stderr.splitlines())
    for phase in (*phases, "step 6/6", "evaluating the trained model"):  # In this order.
        assert any(line.startswith(phase) for line in lines), first.stderr
    results = json.loads((tmp_path / "run/results.json").read_text())
    shown = [line.split() for line in first.stdout.splitlines()]
    final = [f"{value:.4f}" for value in results["final"]["head"].values()]
    assert ["final", "head", *final] in shown
    times = json.loads((tmp_path / "run/times.json").read_text())
    assert times["seconds"]["import"] > 0.1 and " s from launch: " in first.stderr

    again = hypjax_main(*glyphs, "--workdir=run")
    assert again.returncode == 0 and "already" in again.stdout
    further = ["--config.eval.spaces.head=objective,sphere", "--config.eval.metrics=recall,map"]
    evaluated = hypjax_main(*glyphs, "--workdir=run", "--mode=evaluate", *further)
    assert evaluated.returncode == 0, evaluated.stderr
    names, *rows = [line.split() for line in evaluated.stdout.splitlines()[1:4]]
    assert names[-1] == "map"
    alone = hypjax_main("--workdir=run", "--mode=evaluate", *further)
    assert alone.stdout == evaluated.stdout, alone.stderr
    printed = hypjax_main(*glyphs, "--print", "--config.seed=3")
    assert printed.returncode == 0
    (line,) = (line for line in printed.stdout.splitlines() if "config.seed " in line)
    assert line.split()[1:] == ["3", "command", "line"]
    assert [row[:2] for row in rows] == [["final", "head"], ["final", "head:sphere"]]
    assert rows[0][2:-1] == final


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "error: --config is missing; try --config=configs/glyphs.py"),
        (["--config=none.py"], "error: no configuration file none.py"),
    ],
)
def test_errors_on_the_command_line_are_one_sentence(hypjax_main, args, message):
    finished = hypjax_main(*args)
    assert finished.returncode == 1
    assert finished.stderr.startswith(message)
    assert len(finished.stderr.splitlines()) == 1


def test_errors_in_the_configuration_are_one_sentence(hypjax_main, glyphs):
    finished = hypjax_main(*glyphs, "--config.train.total_stepz=3")
    assert finished.returncode == 1
    assert finished.stderr == (
        "error: unknown field config.train.total_stepz; did you mean train.total_steps?\n"
    )
    unwritable = hypjax_main(*glyphs, "--config.run.data_dir=/proc/nowhere")
    assert unwritable.returncode == 1
    assert unwritable.stderr.splitlines()[-1].startswith("error: cannot write to /proc/nowhere")
    taken = hypjax_main(*glyphs, "--workdir=/proc/nowhere")
    assert taken.returncode == 1
    assert taken.stderr.startswith("error: cannot write to /proc/nowhere")


def test_imports_are_light(repository):
    """`import hypjax` is without JAX, and training works without TensorFlow and PyTorch."""
    program = (
        "import sys, hypjax; assert {'load', 'push', 'Model'} <= set(dir(hypjax))\n"
        "assert not hasattr(hypjax, 'lode') and not {'jax', 'flax'} & set(sys.modules)\n"
        "sys.modules['tensorflow'] = sys.modules['torch'] = None  # Importing them is an error.\n"
        "import hypjax.train, hypjax.evaluate; hypjax.load"
    )
    subprocess.run([sys.executable, "-c", program], cwd=repository, check=True)


def test_training_needs_neither_tensorflow_nor_torch(repository):
    program = (
        "import sys, hypjax.train, hypjax.evaluate;"
        "print(sorted({'tensorflow', 'torch'} & set(sys.modules)))"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program], cwd=repository, capture_output=True, text=True, check=True
    )
    assert finished.stdout.strip() == "[]"
