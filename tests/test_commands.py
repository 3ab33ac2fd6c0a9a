"""Command modules and what they share: each parses its own flags, all in one process."""

import configparser
import copy
import importlib
import shlex

import pytest

from hypjax import cli, command
from hypjax.errors import UserError
from tests.helpers import commands
from tests.helpers.process_pair import python

ALL = commands.names()


def test_each_command_is_a_sub_command(repository):
    modules = (repository / "hypjax").glob("*.py")
    assert {path.stem for path in modules if "\n    command.run(" in path.read_text()} <= {*ALL}
    setup = configparser.ConfigParser()
    setup.read(repository / "setup.cfg")
    points = setup["options.entry_points"]["console_scripts"].split()
    assert points == ["hypjax", "=", "hypjax.cli:main"]
    assert cli.COMMANDS["train"] == "hypjax.main"


@pytest.mark.parametrize(
    ("arguments", "status", "shown"),
    [
        ([], 0, "train         Trains and evaluates"),
        (["train", "--help"], 0, "--mode: <train|evaluate>"),
        (
            ["convert", "--help"],
            0,
            "example:\n  python -m hypjax.convert ",
        ),
        (["serch"], 1, "error: 'serch' is no command of hypjax; did you mean search?"),
    ],
)
def test_the_program_runs_its_sub_commands(arguments, status, shown, tmp_path):
    done = python("-m", "hypjax.cli", *arguments, cwd=tmp_path)
    assert done.returncode == status and shown in (done.stderr if status else done.stdout)
    assert not (done.stdout if status else done.stderr)


@pytest.mark.slow
def test_devices_that_jax_does_not_find_are_one_sentence():
    arguments = ("-m", "hypjax.main", "--config=configs/glyphs.py", "--workdir=run")
    done = python(*arguments, JAX_PLATFORMS="rocm")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: JAX finds no device of those in JAX_PLA")


def test_one_process_imports_all_commands_without_touching_global_flags():
    imports = "".join(f"import hypjax.{name}\n" for name in ALL)
    program = f"from absl import flags\n{imports}assert 'workdir' not in flags.FLAGS\n"
    # --help answers at once, and signals have their exit statuses before JAX is imported.
    heavy = {"jax", "numpy", "ml_collections", "matplotlib"}
    program += f"import sys; assert not {heavy} & set(sys.modules)"
    done = python("-c", program)
    assert done.returncode == 0, done.stderr


MISTAKES = {
    "flags": [
        ("main --confg=x", "config"),
        ("main --mode=eval", "evaluate"),
        ("search --k=0", "--k"),
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


def test_flags_overrides_and_words_are_separated():
    module = importlib.import_module("benchmarks.__main__")
    flag_values = copy.deepcopy(module.FLAGS)
    argv = ["benchmarks", "job", "--quick", "--config.run.microbatch=5", "--showprefixforinfo"]
    assert command.parse(argv, flag_values, module.CHOICES) == [["run.microbatch=5"], "job"]
    assert flag_values.quick and not module.FLAGS["quick"].present
    assert command.parse(["benchmarks"], flag_values, module.CHOICES) == [[], None]
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
