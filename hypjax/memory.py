"""Says in a sentence that a device's memory did not suffice."""

import contextlib
from collections.abc import Iterator

import jax

from hypjax.errors import UserError


@contextlib.contextmanager
def explained(remedy: str) -> Iterator[None]:
    """Turns the failure to allocate an array into a `UserError`.

    Args:
        remedy: What to lower.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        device = jax.local_devices()[0].device_kind
        raise UserError(f"out of memory on {device}; lower {remedy}") from error
