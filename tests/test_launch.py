"""The scripts in launch/, with stubs for the programs that they call."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from hypjax import main
from hypjax.config import default_config, flatten

TRAINING = """
echo "python $*" >>"$LOG"
case $* in
  *hypjax.main*) read -r status <"$STATUSES"; sed -i 1d "$STATUSES"; exit "$status" ;;
esac
"""
SRUN = """
options=
while [[ $1 == --* ]]; do options+=" $1"; shift; done
echo "srun$options" >>"$LOG"
highest=0
while [ -s "$STATUSES" ]; do
  status=0; "$@" || status=$?
  [ "$status" -le "$highest" ] || highest=$status
done
exit "$highest"
"""
GCLOUD = """
echo "gcloud $*" >>"$LOG"
case $* in
  *describe*) read -r state <"$STATES"; sed -i 1d "$STATES"; [ -n "$state" ] && echo "$state" ;;
  *"hypjax.main"*) read -r status <"$STATUSES"; sed -i 1d "$STATUSES"; exit "$status" ;;
  *"uv pip"*) exit "${INSTALLATION:-0}" ;;
esac
"""

CHECKED = """
echo "python $*" >>"$LOG"
case $* in
  *"benchmarks parity"*) printf 'a\\nb\\n'; exit 3 ;;
  *"benchmarks train"*) echo "| 1.5 s |"; echo '{"train": []}' >"${5#--output=}"; exit 75 ;;
esac
"""


class Stubs:
    """A folder of stub programs that comes first on PATH, and the log of their command lines."""

    def __init__(self, repository, folder):
        self.launch, self.folder = repository / "launch", folder
        self._log = folder / "log"
        self._log.touch()

    def add(self, name, body):
        path = self.folder / name
        path.write_text(f"#!/usr/bin/env bash\n{body}")
        path.chmod(0o755)

    def feed(self, name, *values):
        (self.folder / name).write_text("".join(f"{value}\n" for value in values))

    def run(self, *command, **env):
        files = {name: str(self.folder / name) for name in ("STATUSES", "STATES")}
        env = {"LOG": str(self._log), "PAUSE": "0", "SLURM_JOB_ID": "7"} | files | env
        return subprocess.run(
            [str(self.launch / command[0]), *command[1:]],
            env=os.environ | {"PATH": f"{self.folder}:{os.environ['PATH']}"} | env,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def calls(self, program=""):
        return [call for call in self._log.read_text().splitlines() if call.startswith(program)]


@pytest.fixture
def stubs(repository, tmp_path):
    stubs = Stubs(repository, tmp_path)
    stubs.add("python", TRAINING)
    return stubs


@pytest.fixture
def slurm(stubs):
    stubs.add("srun", SRUN)
    stubs.add("scontrol", 'echo "scontrol $*" >>"$LOG"')
    return stubs


@pytest.fixture
def tpu(stubs):
    stubs.add("gcloud", GCLOUD)
    stubs.add("tar", 'echo "tar $*" >>"$LOG"')
    return stubs


@pytest.mark.parametrize(("backend", "last"), [("gpu", 75), ("cpu", 1)])
def test_gpus_trains_only_if_jax_finds_a_gpu(stubs, backend, last):
    (stubs.folder / "jax.py").write_text(f"def default_backend():\n    return {backend!r}\n")
    stubs.feed("STATUSES", 75)
    stubs.add("python", f'[ "$1" != -c ] || exec {sys.executable} "$@"\n{TRAINING}')
    done = stubs.run("gpus.sh", "--config=a b.py", "--workdir=runs/a")
    assert done.returncode == last
    assert done.stderr.startswith("error: JAX finds no GPU") == (backend == "cpu")
    trained = ["python -m hypjax.main --config=a b.py --workdir=runs/a"]
    assert stubs.calls() == (trained if backend == "gpu" else [])


@pytest.mark.parametrize(
    ("statuses", "last", "runs"), [((75, 134, 0), 0, 3), ((1, 0), 1, 1), ((130, 0), 130, 1)]
)
def test_a_command_is_repeated_until_its_status_is_final(stubs, statuses, last, runs):
    stubs.feed("STATUSES", *statuses)
    done = stubs.run("until_done.sh", "python", "-m", "hypjax.main", "--config=a b.py")
    assert done.returncode == last
    assert stubs.calls() == ["python -m hypjax.main --config=a b.py"] * runs


def test_a_command_is_not_repeated_after_a_signal_to_the_script(stubs):
    stubs.add("python", 'echo run >>"$LOG"; kill -TERM $PPID; exit 75')
    assert stubs.run("until_done.sh", "python").returncode == 75
    assert stubs.calls() == ["run"]


@pytest.mark.parametrize(
    ("statuses", "restarts", "last", "requeued"),
    [
        ((0, 0), 0, 0, False),
        ((75, 75), 0, 75, True),  # Saved.
        ((75, 75), 100, 75, False),  # Saved too often.
        ((134, 137), 0, 137, True),  # One was killed.
        ((1, 1), 0, 1, False),  # A user error.
    ],
)
def test_a_slurm_job_is_requeued_unless_done_or_failed(slurm, statuses, restarts, last, requeued):
    slurm.feed("STATUSES", *statuses)
    env = {"SLURM_CPUS_PER_TASK": "8", "SLURM_RESTART_COUNT": str(restarts)}
    done = slurm.run("slurm.sh", "--config=a.py", "--workdir=b c", **env)
    assert done.returncode == last, done.stderr
    assert ("submit the same command again" in done.stderr) == (restarts > 0)
    assert slurm.calls("scontrol") == ["scontrol requeue 7"] * requeued
    task = "python -m hypjax.main --coordinator=auto --config=a.py --workdir=b c"
    assert slurm.calls("python") == [task] * len(statuses)
    assert slurm.calls("srun") == ["srun --kill-on-bad-exit=0 --wait=0 --cpus-per-task=8"]


def test_a_cancelled_slurm_job_is_not_requeued(slurm):
    slurm.add("srun", "kill -TERM $PPID; exit 75")
    done = slurm.run("slurm.sh")
    assert done.returncode == 75 and "Slurm ended this job" in done.stderr
    assert not slurm.calls("scontrol")


def test_the_slurm_options_are_consistent_and_come_first(repository):
    script = (repository / "launch/slurm.sh").read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", script, re.MULTILINE))
    assert options["ntasks-per-node"] == options["gres"].removeprefix("gpu:")
    assert options["signal"].startswith("TERM@")  # B:TERM@ would reach only this script.
    assert options["open-mode"] == "append" and "requeue" in options
    assert script.index("#SBATCH") < script.index("\nset ") > script.rindex("#SBATCH")


@pytest.mark.parametrize(
    ("status", "restarts", "requeued"), [(0, 0, False), (75, 0, True), (75, 100, False), (1, 0, 0)]
)
def test_a_part_of_a_gallery_is_requeued_if_it_was_interrupted(slurm, status, restarts, requeued):
    slurm.add("python", f'echo "python $*" >>"$LOG"; rm "$STATUSES"; exit {status}')
    slurm.feed("STATUSES", status)
    env = {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "16", "SLURM_ARRAY_JOB_ID": "7"}
    env["SLURM_RESTART_COUNT"] = str(restarts)
    done = slurm.run("embed_slurm.sh", "--workdir=a b", "--output=g.npz", **env)
    assert done.returncode == status
    (call,) = slurm.calls("python")
    assert call == "python -m hypjax.embed --workdir=a b --output=g.npz --shard=3/16"
    assert slurm.calls("scontrol") == ["scontrol requeue 7_3"] * requeued


def test_the_pods_of_a_gallery_embed_all_parts_and_then_join_them(repository):
    yaml = pytest.importorskip("yaml", reason="needs PyYAML")
    spec = yaml.safe_load((repository / "launch/embed_jobset.yaml").read_text())["spec"]
    parts, merge = spec["replicatedJobs"]
    (embed,) = parts["template"]["spec"]["template"]["spec"]["containers"]
    (join,) = merge["template"]["spec"]["template"]["spec"]["containers"]
    count = parts["template"]["spec"]["completions"]
    assert merge["dependsOn"] == [{"name": parts["name"], "status": "Complete"}]
    _, _, program, name, *given = embed["command"]
    for index in (0, count - 1):
        command = ["bash", "-c", program.replace("exec python", "echo"), name, *given]
        env = os.environ | {"JOB_COMPLETION_INDEX": str(index)}
        shown = subprocess.check_output(command, env=env, text=True).split()
        assert shown == ["-m", "hypjax.embed", *given, f"--shard={index + 1}/{count}"]
    assert set(given) - set(join["command"]) == {"--workdir=/data/runs/sop"}


def test_tpu_vm_installs_and_trains_on_all_hosts(tpu, repository):
    tpu.feed("STATES", "READY")
    tpu.feed("STATUSES", 0)
    done = tpu.run("tpu_vm.sh", "pod", "zone", "--config=a.py", "--workdir=gs://b/my run")
    assert done.returncode == 0, done.stderr
    describe, pack, copy, install, train = tpu.calls()
    assert describe == "gcloud compute tpus tpu-vm describe pod --zone=zone --format=value(state)"
    folder, *packed = pack.split(" -C ")[1].split()
    assert pathlib.Path(folder) == repository and "hypjax" in packed
    assert all((repository / name).exists() for name in packed)
    assert copy.endswith(" pod:hypjax.tar.gz --zone=zone --worker=all")
    assert "ssh pod" in install and "--worker=all" in install and "hypjax[tpu]" in install
    assert "ssh pod" in train and "--worker=all" in train
    assert train.endswith(r"hypjax.main --coordinator=auto --config=a.py --workdir=gs://b/my\ run")


@pytest.mark.parametrize(
    ("states", "statuses", "last"),
    [
        (["READY", "READY"], [75, 0], 0),  # Saved.
        (["READY", "READY"], [255, 0], 0),  # The connection was lost.
        (["READY", "READY"], [1, 0], 1),  # A user error.
        (["READY", "REPAIRING", "REPAIRING", "READY"], [1, 0], 0),  # A failure of gcloud.
    ],
)
def test_a_tpu_trains_again_unless_it_is_done_or_fails(tpu, states, statuses, last):
    tpu.feed("STATES", *states)
    tpu.feed("STATUSES", *statuses)
    assert tpu.run("tpu_vm.sh", "pod", "zone", "--config=a.py").returncode == last
    assert sum("hypjax.main" in call for call in tpu.calls()) == (1 if last else 2)


def test_a_preempted_tpu_is_created_again_if_its_type_is_given(tpu):
    tpu.feed("STATES", "PREEMPTED", "READY")
    done = tpu.run("tpu_vm.sh", "pod", "zone", "--config=a.py")
    assert done.returncode == 1 and "TPU pod in zone is PREEMPTED" in done.stderr

    tpu.feed("STATES", "PREEMPTED", "READY")
    tpu.feed("STATUSES", 0)
    kind = {"ACCELERATOR": "v5litepod-16", "VERSION": "v2", "CREATE": "--spot --network=n"}
    assert tpu.run("tpu_vm.sh", "pod", "zone", "--config=a.py", **kind).returncode == 0
    changed = [call.split("tpu-vm ")[1] for call in tpu.calls() if re.search("delete|create", call)]
    flags = "--zone=zone --accelerator-type=v5litepod-16 --version=v2 --spot --network=n"
    assert changed == ["delete pod --zone=zone --quiet", f"create pod {flags}"]


def test_a_tpu_with_a_failed_installation_is_not_trained_on(tpu):
    tpu.feed("STATES", "READY", "READY")
    done = tpu.run("tpu_vm.sh", "pod", "zone", "--config=a.py", INSTALLATION="1")
    assert done.returncode == 1 and not any("hypjax.main" in call for call in tpu.calls())


def test_colab_keeps_runs_on_drive_and_data_on_the_local_disk(stubs, repository, tmp_path):
    stubs.launch = tmp_path / "repository/launch"
    shutil.copytree(repository / "launch", stubs.launch)
    drive, data = tmp_path / "drive", tmp_path / "data"
    where = {"DRIVE": str(drive), "DATA": str(data)}
    unmounted = stubs.run("colab.sh", "--config=a.py", **where)
    assert unmounted.returncode == 1 and "drive.mount" in unmounted.stderr

    (drive / "hypjax/datasets/cub200").mkdir(parents=True)
    (drive / "hypjax/datasets/cub200/records").write_text("images")
    for _ in range(2):  # The second time in a runtime that is set up already.
        stubs.feed("STATUSES", 75)
        assert stubs.run("colab.sh", "--config=a.py", **where).returncode == 75
    assert (data / "cub200/records").read_text() == "images"
    assert (tmp_path / "repository/runs").resolve() == drive / "hypjax/runs"
    last = f"python -m hypjax.main --config.run.data_dir={data} --config=a.py"
    assert stubs.calls()[-1] == last


def test_a_sweep_checks_its_values_trains_each_and_prints_a_table(stubs):
    stubs.feed("STATUSES", 0, 1, 0)
    options = "--config.seed=1", "--output=a b.png"
    done = stubs.run("sweep.sh", "a.py:b", "objective.c", "0.1", "1e-3", "2", *options)
    assert done.returncode == 1  # That of the failed run; the others are trained all the same.
    flags = "--config=a.py:b --config.seed=1"
    table = f"python -m hypjax.compare {flags} --field=objective.c"
    table += " --value=0.1 --value=1e-3 --value=2 --output=a b.png"
    train = f"python -m hypjax.main {flags} --config.objective.c="
    trained = [train + value for value in ("0.1", "1e-3", "2")]
    assert stubs.calls() == [f"{table} --check", *trained, table]


def test_seeds_are_a_sweep_over_the_field_seed(stubs):
    stubs.feed("STATUSES", 0, 0)
    assert stubs.run("seeds.sh", "a.py:b", "0", "1", "--config.objective.c=1").returncode == 0
    flags = "--config=a.py:b --config.objective.c=1"
    table = f"python -m hypjax.compare {flags} --field=seed --value=0 --value=1"
    train = f"python -m hypjax.main {flags} --config.seed="
    assert stubs.calls() == [f"{table} --check", f"{train}0", f"{train}1", table]


def test_a_sweep_ends_at_an_interrupt_and_before_training_if_a_value_is_invalid(stubs):
    stubs.feed("STATUSES", 130, 0)
    assert stubs.run("sweep.sh", "a.py", "objective.c", "0.1", "0.2").returncode == 130
    assert len(stubs.calls()) == 2
    stubs.add("python", f"{TRAINING}\nexit 1")
    assert stubs.run("sweep.sh", "a.py", "objective.c", "x").returncode == 1
    assert len(stubs.calls()) == 3
    assert stubs.run("sweep.sh", "a.py", "objective.c", "--value").returncode == 2


def test_a_check_of_a_gpu_records_failures_and_goes_on(stubs):
    stubs.add("python", CHECKED)
    quick = {"JAX_PLATFORMS": "cpu", "OUTPUT": str(stubs.folder / "check")}
    assert stubs.run("gpu_check.sh", **quick).returncode == 1
    written = json.loads((stubs.folder / "check.json").read_text())["stages"]
    outcomes = {stage["stage"]: stage["outcome"] for stage in written}
    assert [name for name, outcome in outcomes.items() if outcome == "failed"] == [
        *("parity", "resume")  # The stub ends before it is killed.
    ]
    assert outcomes["step"] == outcomes["job"] == "passed" and outcomes["train"] == "cut short"
    assert written[1]["end"] == ["a", "b"] and written[1]["status"] == 3
    page = (stubs.folder / "check.md").read_text()
    assert "| parity | failed | 0 | b |" in page and "| 1.5 s |" in page
    assert not any(" pip " in call for call in stubs.calls())
    stubs.run("gpu_check.sh", **quick, EXTRA="cuda13")
    assert any(call.endswith("pip install -q -e .[cuda13]") for call in stubs.calls())


def test_the_pods_of_a_jobset_find_each_other_and_only_a_user_error_ends_it(repository):
    yaml = pytest.importorskip("yaml", reason="needs PyYAML")
    jobset = yaml.safe_load((repository / "launch/jobset.yaml").read_text())
    [job] = jobset["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    [container] = spec["template"]["spec"]["containers"]
    flags = dict(flag[2:].split("=", 1) for flag in container["command"] if flag[:2] == "--")
    name = jobset["metadata"]["name"]
    assert flags["coordinator"].startswith(f"{name}-{job['name']}-0-0.{name}:")
    assert spec["completions"] == spec["parallelism"] == int(flags["num_processes"])
    assert spec["completionMode"] == "Indexed"
    assert flags["process_id"] == "$(JOB_COMPLETION_INDEX)"
    assert all(flag in main.FLAGS for flag in flags if not flag.startswith("config."))

    [rule] = jobset["spec"]["failurePolicy"]["rules"]
    assert rule == {"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    failing = [r for r in spec["podFailurePolicy"]["rules"] if r["action"] == "FailJob"]
    assert [r["onExitCodes"]["values"] for r in failing] == [[1]]
    assert spec["backoffLimit"] == 0 and spec["template"]["spec"]["restartPolicy"] == "Never"


def test_the_fields_that_launch_sets_exist(repository):
    texts = [path.read_text() for path in (repository / "launch").iterdir()]
    named = set(re.findall(r"--config\.([a-z_.]+)=", "".join(texts)))
    known = {*flatten(default_config()), *flatten(default_config("hier+proxy_anchor"))}
    assert "run.data_dir" in named and named - known == set()
