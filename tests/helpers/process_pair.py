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


class ProcessPair:
    """Two processes of a small run, with two devices each."""

    def __init__(self, path, workdir, *overrides, config=small_runs.CONFIG):
        with socket.create_server(("localhost", 0)) as probe:  # At a port that is free.
            coordinator = f"--coordinator=localhost:{probe.getsockname()[1]}"
        shared, env = (coordinator, "--num_processes=2"), environment_with_devices(2)
        self.processes = [
            small_runs.start(
                path, workdir, *overrides, flags=(*shared, own), env=env, config=config
            )
            for own in ("--process_id=0", "--process_id=1")
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
        texts = [process.communicate(timeout=300) for process in self.processes]
        return [(p.returncode, *text) for p, text in zip(self.processes, texts, strict=True)]
