"""Command modules and what they share: each parses its own flags, all in one process."""

import shlex

import numpy as np
import pytest

from hypjax import cli, command
from hypjax.errors import UserError
from tests.helpers import commands
from tests.helpers.process_pair import python

ALL = commands.names()


def test_each_command_is_a_sub_command(repository):
    modules = (repository / "hypjax").glob("*.py")
    assert {path.stem for path in modules if "\n    command.run(" in path.read_text()} <= {*ALL}


def test_the_program_runs_its_sub_commands(monkeypatch, capsys):
    for flags, printed in (([], "train         Trains and evaluates"), (["--version"], "hypjax ")):
        monkeypatch.setattr("sys.argv", ["hypjax", *flags])
        cli.main()
        assert printed in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["hypjax", "serch"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert "did you mean search?" in capsys.readouterr().err and ended.value.code == 1


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


MISTAKES = [
    ("main --mode=eval", "evaluate"),
    ("search --k=0", "--k"),
    ("search --gallery=. --query=a", "hypjax.embed --images"),
    ("embed --images=a --workdir=a", "--output is missing"),
    ("spectrum --config.seed=1", "takes no configuration"),
    ("search --gallery=3.npz --query=4.npz --k=2", "4 coordinates"),
    ("compare runs/none", "no finished run in runs/none"),
    ("search --workdir=a --gallery=g.npz --query=q", "g.npz does not exist"),
    ("search --workdir=a --gallery=g --query=q --alpha=3", "--alpha has no effect without"),
    ("score --embeddings=a --std=1,1", "--std has no effect without --encoder=onnx"),
    ("plot disk --workdir=a --output=a.png --k=3", "--k has no effect on disk, only on hits"),
    ("main --config=features --output=a.json", "--output has no effect without --mode=evaluate"),
    ("score --querys=a", "did you mean --queries?"),
    ("score --workdir=a", "unknown flag --workdir (--help"),
    ("main --config=a --engine=jax", "unknown flag --engine; set --config.run.engine=VALUE"),
    ("score --embeddings=a --ks=a", "number, or several"),
    ("search --rerank=maybe", "true or false"),
    ("search -k=3", "did you mean --k?"),
    ("search --k", "--k expected one argument"),
    ("plot disc --output=a.png", "the word is 'disc'; it must be one of disk, grid, hits; did you"),
    ("embed --dataset=sop --output=a.npz --exclude=b", "--exclude has no effect without --images"),
    ("main --model.width=3", "--config.FIELD"),
    ("export --dataset=grocry", "revisitop1m; did you mean grocery?"),
    ("plot disk --output=a.png", "--workdir or --embeddings"),
    ("plot disk --output=a.svg --workdir=a", "must be a file"),
    ("report --workdir=a --output=no/a.html", "no folder no"),
    ("papers", "name a table"),
    ("papers hyp-vit-9", "irt-2"),
    ("papers irt-2 ViT", "IRT-R-DeiT-distilled"),
]


@pytest.mark.parametrize(("line", "keyword"), MISTAKES)
def test_mistakes_are_one_sentence(line, keyword, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.svg").mkdir()
    for dim in (3, 4):
        np.savez(f"{dim}.npz", features=np.ones((5, dim), np.float32))
    with pytest.raises(UserError) as error:
        commands.call(*shlex.split(line))
    assert keyword in str(error.value)


def test_flags_overrides_and_words_are_separated():
    main = commands.module("benchmarks").main
    for words in (["job", "--quick"], ["--noquick", "--quick=TRUE", "job"], ["--quick", "job"]):
        bound = command.parse(main, ["benchmarks", *words, "--config.run.microbatch=5"])
        assert bound.args == ("job",) and bound.kwargs["overrides"] == ["run.microbatch=5"]
        assert bound.kwargs["quick"] and bound.kwargs["repeats"] == 3
    for words in (["jobs"], ["job", "extra"]):
        with pytest.raises(UserError, match=words[-1]):
            command.parse(main, ["benchmarks", *words])
