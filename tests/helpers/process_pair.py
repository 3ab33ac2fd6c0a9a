"""Processes: of any program, and of runs of two processes; JAX may see several devices in them."""

import os
import pathlib
import socket
import subprocess
import sys
import time

from tests.helpers import small_runs


def environment_with_devices(count):
    """The environment of a process in which JAX sees the given number of CPU devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
    return os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}


def python(*arguments, devices=1, cwd=small_runs.REPOSITORY, **env):
    """Runs Python with these arguments to its end, and returns the process with its output."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=environment_with_devices(devices) | {"PYTHONPATH": str(small_runs.REPOSITORY)} | env,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=600,
    )


def free_port():
    """A port of this machine that no program listens on."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


class ProcessPair:
    """Two processes of a small run, with two devices each."""

    def __init__(self, path, workdir, *overrides):
        command = small_runs.command(path, workdir, *overrides)
        command += [f"--coordinator=localhost:{free_port()}", "--num_processes=2"]
        self.processes = [
            subprocess.Popen(
                [*command, f"--process_id={index}"],
                env=environment_with_devices(2) | {"PYTHONPATH": str(small_runs.REPOSITORY)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for index in range(2)
        ]
        self._metrics = pathlib.Path(workdir) / "metrics.jsonl"

    def wait_for_a_step(self, after=0):
        """Waits until more than the given number of steps are logged."""
        deadline = time.monotonic() + 120
        while not self._metrics.exists() or self._metrics.read_text().count('"loss"') <= after:
            running = all(process.poll() is None for process in self.processes)
            assert running, self.wait_for_both()
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def wait_for_both(self):
        """Returns the status, output and errors of each process, once both have ended."""
        texts = [process.communicate(timeout=120) for process in self.processes]
        return [(p.returncode, *text) for p, text in zip(self.processes, texts, strict=True)]
