"""Command modules and what they share: each parses its own flags, all in one process."""

import copy
import importlib
import shlex

import numpy as np
import pytest

from hypjax import command
from hypjax.errors import UserError
from tests.helpers import commands
from tests.helpers.process_pair import python

ALL = commands.names()


def test_each_command_is_a_sub_command(repository):
    modules = (repository / "hypjax").glob("*.py")
    assert {path.stem for path in modules if "\n    command.run(" in path.read_text()} <= {*ALL}


@pytest.mark.parametrize(
    ("arguments", "status", "shown"),
    [
        ([], 0, "train         Trains and evaluates"),
        (["train", "--help"], 0, "--mode: <train|evaluate>"),
        (["convert", "--help"], 0, "example:\n  python -m hypjax.convert "),
        (["serch"], 1, "error: 'serch' is no command of hypjax; did you mean search?"),
    ],
)
def test_the_program_runs_its_sub_commands(arguments, status, shown, tmp_path):
    done = python("-m", "hypjax.cli", *arguments, cwd=tmp_path)
    assert done.returncode == status and shown in (done.stderr if status else done.stdout)
    assert not (done.stdout if status else done.stderr)


def test_imports_are_light():
    """Commands need no JAX, so that --help answers at once; training needs no TensorFlow."""
    program = f"""
import sys
from absl import flags
import hypjax, {", ".join(f"hypjax.{name}" for name in ALL)}
assert 'workdir' not in flags.FLAGS and {{'load', 'push', 'Model'}} <= set(dir(hypjax))
assert not {{'jax', 'numpy', 'ml_collections', 'matplotlib'}} & set(sys.modules)
sys.modules['tensorflow'] = sys.modules['torch'] = None  # Importing them is an error.
import hypjax.train, hypjax.evaluate
assert hypjax.load and 'matplotlib' not in sys.modules
"""
    done = python("-c", program)
    assert done.returncode == 0, done.stderr


MISTAKES = {
    "flags": [
        ("main --confg=x", "config"),
        ("main --mode=eval", "evaluate"),
        ("search --k=0", "--k"),
        ("spectrum --config.seed=1", "takes no configuration"),
    ],
    "missing": [
        ("main", "--config"),
        ("compare", "--config"),
        ("compare runs/none", "no finished run in runs/none"),
        ("search --workdir=a --gallery=g.npz --query=q", "cannot read g.npz"),
        ("report --workdir=none", "none holds no run"),
    ],
    "combinations": [
        ("search --workdir=a --gallery=g --query=q --alpha=3", "--alpha"),
        ("compare runs/a --config=a.py", "either"),
        ("plot disk --output=a.png", "--workdir or --embeddings"),
        ("plot disk --output=a.png --workdir=a --parts=val", "--parts=val"),
        ("plot map --output=a.png", "disk, grid"),
    ],
    "outputs": [
        ("embed --workdir=a --images=. --output=g.txt", "ends in .npz"),
        ("plot disk --output=a.svg --workdir=a", "must be a file"),
        ("report --workdir=a --output=a.pdf", "ends in .html"),
        ("report --workdir=a --output=no/a.html", "no folder no"),
    ],
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_mistakes_are_one_sentence(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.svg").mkdir()
    for line, keyword in MISTAKES[kind]:
        with pytest.raises(UserError) as error:
            commands.call(*shlex.split(line))
        assert keyword in str(error.value), line


def test_queries_of_another_dimension_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for dim in (3, 4):
        np.savez(f"{dim}.npz", features=np.ones((5, dim), np.float32))
    with pytest.raises(UserError, match=r"4\.npz has 4 coordinates .* 3\.npz has 3"):
        commands.call("search", "--gallery=3.npz", "--query=4.npz")


def test_flags_overrides_and_words_are_separated():
    module = importlib.import_module("benchmarks.__main__")
    flag_values = copy.deepcopy(module.FLAGS)
    argv = ["benchmarks", "job", "--quick", "--config.run.microbatch=5"]
    assert command.parse(argv, flag_values, module.CHOICES) == [["run.microbatch=5"], "job"]
    assert flag_values.quick and not module.FLAGS["quick"].present
    with pytest.raises(UserError, match="^'jobs' is not one of loss, "):
        command.parse(["benchmarks", "jobs"], flag_values, module.CHOICES)
    with pytest.raises(UserError, match="^unexpected argument 'job'"):
        command.parse(["benchmarks", "job"], flag_values)


@pytest.mark.parametrize("name", ALL)
def test_the_example_of_a_command_exists(name, repository, monkeypatch):
    monkeypatch.chdir(repository)
    example = importlib.import_module(f"hypjax.{name}").EXAMPLE
    assert example.startswith(f"python -m hypjax.{name} ")
    assert commands.problems(f"```\n{example}\n```\n") == []
