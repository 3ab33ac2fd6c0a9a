"""Several processes of one run: they meet, agree, and let the first one read and write."""

import json
import sys
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
from hypjax.errors import TRY_AGAIN, TryAgainError, UserError
from hypjax.parallel import watchdog
from hypjax.system import console, exits

_MEETING = 300  # Seconds.
_UPLOADING = 24 * 3600  # Seconds that all wait at the end for the first to close its folder.
_LEAST_ROOM = 1024  # Bytes of a message; room grows in powers of two, so that programs are reused.


def join(coordinator: str, num_processes: int | None, process_id: int | None) -> None:
    """Makes this process one of several, before JAX is used; only the first one speaks from then.

    Args:
        coordinator: HOST:PORT of the first process, or auto: what JAX finds out of Slurm, Open MPI,
            Kubernetes or a TPU's own environment.
        num_processes: How many there are; None: found out.
        process_id: Which this is, from 0; None: found out.

    Raises:
        UserError: Nothing can be found out, or the others do not come.
    """
    given = None if coordinator == "auto" else coordinator
    if given:
        _require_complete(given, num_processes, process_id)
    detection = "deactivate" if given else None
    jax.config.update("jax_enable_preemption_service", False)  # It would take SIGTERM for itself.
    alarm = threading.Timer(_MEETING, _give_up, [coordinator])  # JAX would abort.
    alarm.start()
    try:
        jax.distributed.initialize(
            given,
            num_processes,
            process_id,
            cluster_detection_method=detection,
            initialization_timeout=2 * _MEETING,
            shutdown_timeout_seconds=_UPLOADING,
        )
    except (ValueError, TypeError) as error:
        raise UserError(
            f"--coordinator={coordinator} finds no Slurm, Open MPI, Kubernetes or TPU that "
            f"tells of all processes ({error}); give --coordinator=HOST:PORT --num_processes=N "
            "--process_id=I"
        ) from error
    except (RuntimeError, jax.errors.JaxRuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise TryAgainError(
            f"the processes did not meet at --coordinator={coordinator} ({reason}); start all of "
            "them, with one address that all can reach"
        ) from error
    finally:
        alarm.cancel()
    if len(jax.devices()) != jax.process_count() * jax.local_device_count():
        raise UserError(
            f"process {jax.process_index()} has {jax.local_device_count()} of the "
            f"{len(jax.devices())} devices of {jax.process_count()} processes; all must have the "
            "same number"
        )
    if jax.process_count() > 1:
        console.say(f"process {jax.process_index()} of {jax.process_count()} is there")
        host = None if given is None else given.rsplit(":", 1)[0]
        invitation = from_first(lambda: watchdog.invite(jax.process_count(), host))
        watchdog.accept(invitation, jax.process_index(), jax.process_count())
    if not is_first():
        console.mute()


def _require_complete(coordinator: str, num_processes: int | None, process_id: int | None) -> None:
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal():
        raise UserError(f"--coordinator is {coordinator}; it must be HOST:PORT, or auto")
    if num_processes is None or process_id is None:
        raise UserError(f"--coordinator={coordinator} needs --num_processes and --process_id too")
    if process_id >= num_processes:
        raise UserError(
            f"--process_id is {process_id}; of {num_processes} processes it must be one from 0 to "
            f"{num_processes - 1}"
        )


def _give_up(coordinator: str) -> NoReturn:
    print(
        f"error: the processes did not meet at --coordinator={coordinator} within {_MEETING} "
        "seconds; start all of them, with one address that all can reach",
        file=sys.stderr,
        flush=True,
    )
    exits.at_once(TRY_AGAIN)


def is_first() -> bool:
    """Whether this is the process that reads and writes the run's folder."""
    return jax.process_index() == 0


def from_first(make: Callable[[], Any]) -> Any:
    """What the first process makes, as JSON, in all of them; the others do not call the function.

    All processes are to call this at once. Where the first one fails, all end.
    """
    if jax.process_count() == 1:
        return make()
    told = json.dumps(make()).encode() if is_first() else b""
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(told))))
    room = np.zeros(max(_LEAST_ROOM, 1 << (size - 1).bit_length()), np.uint8)
    room[: len(told)] = np.frombuffer(told, np.uint8)
    return json.loads(bytes(multihost_utils.broadcast_one_to_all(room)[:size]))


def arrays_from_first(make: Callable[[], PyTree | None], like: PyTree) -> PyTree | None:
    """Arrays that the first process makes, in all of them, or None if it makes none.

    They are left on the host, or, in a single process, as they are.

    Args:
        make: What the first process calls.
        like: Arrays of these shapes and dtypes, or what tells them.
    """
    if jax.process_count() == 1:
        return make()
    made = make() if is_first() else None
    if not from_first(lambda: made is not None):
        return None
    if made is None:
        made = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), like)
    # As bytes: in sums of numbers −0 and the smallest ones would not stay what they are.
    sent = jax.tree.map(lambda x: np.ravel(np.asarray(x)).view(np.uint8), made)
    sent = multihost_utils.broadcast_one_to_all(sent)
    return jax.tree.map(lambda x, y: np.asarray(x).view(y.dtype).reshape(y.shape), sent, made)


def require_same(facts: dict[str, Any]) -> None:
    """Refuses to go on where the processes differ in what they have to have in common.

    Raises:
        UserError: This one differs from the first.
    """
    if jax.process_count() == 1:
        return
    for name, theirs in from_first(lambda: facts).items():
        own = json.loads(json.dumps(facts[name]))
        if own != theirs:
            raise UserError(
                f"process {jax.process_index()} has {name} {own}, but the first process {theirs}; "
                "start all of them alike, with the same data"
            )


class Agreement:
    """Lets all processes know at the same step whether one of them is to end."""

    def __init__(self, mesh: Mesh) -> None:
        """Asks nothing yet."""
        self._mesh = mesh
        self._highest = jax.jit(jnp.max, out_shardings=parallel.replicated(mesh))
        self._asked: jax.Array | None = None

    def __call__(self, status: int) -> int:
        """Tells the status with which this process is to end, 0: not; returns the highest of all.

        Of several processes it is that of the call before, so that none has to wait: all are to
        call it once a step.
        """
        if jax.process_count() == 1:
            return status
        own = np.full(len(parallel.local_rows(self._mesh, self._mesh.size)), status, np.int32)
        asked, self._asked = self._asked, self._highest(parallel.shard(self._mesh, own))
        return 0 if asked is None else int(asked)
