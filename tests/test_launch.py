"""The scripts in launch/: they parse, and three of them call stubs of programs."""

import os
import re
import subprocess

import pytest

from hypjax.config import default_config, flatten

# Each stub logs its command line.
TRAINING = """
echo "python $*" >>"$LOG"
case $* in
  *hypjax.main*) read -r status <"$STATUSES"; sed -i 1d "$STATUSES"; exit "$status" ;;
esac
"""
SRUN = """
while [[ $1 == --* ]]; do shift; done
"$@"
"""


@pytest.fixture
def run(repository, tmp_path):
    """Runs a script with stubs; returns its status and the command lines that they logged."""
    for name, body in (
        *(("python", TRAINING), ("srun", SRUN)),
        ("scontrol", 'echo "scontrol $*" >>"$LOG"'),
    ):
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}")
        (tmp_path / name).chmod(0o755)

    def run(*command, statuses=(), **env):
        (tmp_path / "statuses").write_text("".join(f"{status}\n" for status in statuses))
        (tmp_path / "log").write_text("")
        env |= {"LOG": str(tmp_path / "log"), "STATUSES": str(tmp_path / "statuses"), "PAUSE": "0"}
        env |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
        script = [str(repository / "launch" / command[0]), *command[1:]]
        done = subprocess.run(script, env=os.environ | env, cwd=tmp_path, capture_output=True)
        return done.returncode, (tmp_path / "log").read_text().splitlines()

    return run


def test_scripts_parse_and_set_fields_that_exist(repository):
    paths = sorted((repository / "launch").iterdir())
    for path in paths:
        assert path.suffix == ".yaml" or os.access(path, os.X_OK)
        if path.suffix == ".sh":
            subprocess.run(["bash", "-n", path], check=True)
    text = "".join(path.read_text() for path in paths)
    named = set(re.findall(r"--config\.([a-z_.]+)=", text))
    known = {*flatten(default_config()), *flatten(default_config("hier+proxy_anchor"))}
    assert "run.data_dir" in named and named - known == set()


def test_a_saved_command_is_repeated_and_a_saved_job_requeued(run):
    train = "python -m hypjax.main --config=a b.py"
    again = ("until_done.sh", "python", "-m", "hypjax.main", "--config=a b.py")
    assert run(*again, statuses=(75, 75, 0)) == (0, [train] * 3)
    assert run(*again, statuses=(1, 0)) == (1, [train])
    job = "python -m hypjax.main --coordinator=auto --config=a b.py"
    for status, requeued in ((0, []), (75, ["scontrol requeue 7"]), (1, [])):
        assert run("slurm.sh", "--config=a b.py", statuses=[status]) == (status, [job, *requeued])


def test_a_sweep_trains_each_value_and_prints_a_table(run):
    options = "--config.seed=1", "--output=a b.png"
    status, calls = run("sweep.sh", "a.py:b", "objective.c", "0.1", "2", *options, statuses=(1, 0))
    flags = "--config=a.py:b --config.seed=1"
    table = f"python -m hypjax.compare {flags} --field=objective.c --value=0.1 --value=2"
    table += " --output=a b.png"
    trained = [f"python -m hypjax.main {flags} --config.objective.c={value}" for value in (0.1, 2)]
    assert status == 1 and calls == [f"{table} --check", *trained, table]
