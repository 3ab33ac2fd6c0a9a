"""Joins the processes of a run, and makes them agree.

Only the first one uses the disk, but for checkpoints in parts.
"""

import contextlib
import functools
import inspect
import json
import os
import pathlib
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jaxtyping import PyTree

from hypjax import parallel
from hypjax.errors import TRY_AGAIN, TryAgainError, UserError, reason, writing
from hypjax.system import console, exits

_JOIN_TIMEOUT = 300  # Seconds.
_UPLOAD_TIMEOUT = 24 * 3600  # Seconds to wait while the first process uploads the run's folder.
_MIN_BUFFER = 1024  # Bytes. Buffers' sizes are powers of two, so that few programs compile.


def join(coordinator: str, num_processes: int | None, process_id: int | None) -> None:
    """Joins the processes of a run; call it before JAX is used.

    Afterwards, only the first process prints messages. If a process is lost, JAX aborts the others
    after its heartbeat timeout of 100 seconds. `coordinator` is the first process's HOST:PORT, or
    "auto", with which JAX detects Slurm, Open MPI, Kubernetes or a TPU.
    """
    if is_named := coordinator != "auto":
        host, _, port = coordinator.rpartition(":")
        if not host or not port.isdecimal():
            raise UserError(f"--coordinator is {coordinator}; it must be HOST:PORT, or auto")
        if num_processes is None or process_id is None or process_id >= num_processes:
            rule = "--num_processes, and a --process_id below it"
            raise UserError(f"--coordinator={coordinator} needs {rule}")
    jax.config.update("jax_enable_preemption_service", False)  # It would intercept SIGTERM.
    initialize = functools.partial(
        jax.distributed.initialize,
        coordinator_address=coordinator if is_named else None,
        cluster_detection_method="deactivate" if is_named else None,
        initialization_timeout=2 * _JOIN_TIMEOUT,
    )
    if "shutdown_timeout_seconds" in inspect.signature(initialize).parameters:  # JAX 0.8 has none.
        initialize = functools.partial(initialize, shutdown_timeout_seconds=_UPLOAD_TIMEOUT)
    unconnected = f"cannot connect to --coordinator={coordinator}; all processes must reach it"
    timed_out = f"{unconnected} (not within {_JOIN_TIMEOUT} seconds)"
    # On a timeout of its own, JAX would abort with a stack trace.
    alarm = threading.Timer(_JOIN_TIMEOUT, _give_up, [timed_out])
    alarm.start()
    try:
        initialize(num_processes=num_processes, process_id=process_id)
    except (ValueError, TypeError) as error:
        remedy = "pass --coordinator=HOST:PORT --num_processes=N --process_id=I"
        problem = f"--coordinator={coordinator} detected no cluster ({error})"
        raise UserError(f"{problem}; {remedy}") from error
    except (RuntimeError, jax.errors.JaxRuntimeError) as error:
        raise TryAgainError(f"{unconnected} ({reason(error)})") from error
    finally:
        alarm.cancel()
    if jax.process_count() > 1:
        exits.process_index.append(jax.process_index())
        console.say(f"process {jax.process_index()} of {jax.process_count()} has joined")
    if len(jax.devices()) != jax.process_count() * jax.local_device_count():
        devices = f"{jax.local_device_count()} of {len(jax.devices())} devices"
        problem = f"process {jax.process_index()} has {devices}"
        raise UserError(f"{problem}; start all processes with equally many")
    if not is_first():
        console.mute()


def _give_up(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr, flush=True)
    exits.at_once(TRY_AGAIN)


def is_first() -> bool:
    """Whether this is the first process, which reads and writes the run's folder."""
    return jax.process_index() == 0


def from_first(make: Callable[[], Any]) -> Any:
    """Calls a function in the first process, and broadcasts its result (JSON) or `UserError`."""
    if jax.process_count() == 1:
        return make()
    answer = {}
    if is_first():
        try:
            answer = {"value": make()}
        except UserError as error:
            answer = {"error": str(error), "status": error.status}
    answer = _broadcast(answer)
    if "error" in answer:
        raise (TryAgainError if answer["status"] == TRY_AGAIN else UserError)(answer["error"])
    return answer["value"]


def _broadcast(value: Any, owner: int = 0) -> Any:
    """Sends a JSON value of one process to all."""
    message, is_owner = json.dumps(value).encode(), jax.process_index() == owner
    send = functools.partial(multihost_utils.broadcast_one_to_all, is_source=is_owner)
    size = int(send(np.int32(len(message))))
    buffer = np.zeros(max(_MIN_BUFFER, 1 << (size - 1).bit_length()), np.uint8)
    if is_owner:
        buffer[:size] = np.frombuffer(message, np.uint8)
    return json.loads(bytes(send(buffer)[:size]))


def first_text(text: str) -> str:
    """Sends the text of the first process that has one to all; '' if none has."""
    has_text = multihost_utils.process_allgather(np.int32(bool(text)))
    owner = int(np.argmax(has_text))
    return _broadcast(text, owner) if has_text.any() else ""


def all_write(folder: pathlib.Path) -> bool:
    """Whether all processes see the same folder, and may write into it."""

    def make() -> str:
        with writing(folder):
            return tempfile.mkdtemp(dir=folder, prefix=".written-by-all-")

    name = from_first(make)
    with contextlib.suppress(OSError):
        pathlib.Path(name, str(jax.process_index())).touch()
    multihost_utils.sync_global_devices(name)
    written = from_first(lambda: len(os.listdir(name)))
    from_first(lambda: shutil.rmtree(name, ignore_errors=True))
    return written == jax.process_count()


def arrays_from_first(make: Callable[[], PyTree], like: PyTree) -> PyTree:
    """Calls a function in the first process, and broadcasts the arrays, or None, that it returns.

    `like` holds arrays or `jax.ShapeDtypeStruct`s of the same structure, shapes and dtypes.
    """
    if jax.process_count() == 1:
        return make()
    make_once = functools.cache(make)
    if from_first(lambda: make_once() is None):
        return None
    tree = make_once() if is_first() else jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), like)
    # Sent as bytes: a broadcast is a sum, which would change −0 and subnormal numbers.
    content = jax.tree.map(lambda x: np.ravel(np.asarray(x)).view(np.uint8), tree)
    received = multihost_utils.broadcast_one_to_all(content)
    return jax.tree.map(lambda x, y: np.asarray(x).view(y.dtype).reshape(y.shape), received, tree)


def require_same(facts: dict[str, Any]) -> None:
    """Raises an error in all processes unless the JSON values of all processes are equal."""
    if jax.process_count() == 1:
        return
    own_facts = json.loads(json.dumps(facts))
    first_facts = from_first(lambda: facts)
    different = [name for name, value in first_facts.items() if own_facts[name] != value]
    counts = multihost_utils.process_allgather(np.int32(len(different)))
    if counts.any():
        differences = "".join(f", {name} {own_facts[name]}" for name in different)
        where = f"process {np.argmax(counts > 0)} has another configuration or other data"
        raise UserError(f"{where} than the first process{differences}; start all with the same")


class Agreement:
    """Makes all processes stop after the same step if one of them must."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._max = jax.jit(jnp.max, out_shardings=parallel.replicated(mesh))
        self._pending: jax.Array | None = None

    def __call__(self, status: int) -> int:
        """Announces an exit status, or 0 to go on, after each step; returns the highest one."""
        if jax.process_count() == 1:
            return status
        rows = len(parallel.local_rows(self._mesh, self._mesh.size))
        local = parallel.shard(self._mesh, np.full(rows, status, np.int32))
        # The result is that of the previous call, so that no process waits.
        previous, self._pending = self._pending, self._max(local)
        return 0 if previous is None else int(previous)
