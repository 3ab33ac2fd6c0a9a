"""The cache of compiled programs: damaged entries are replaced."""

import pytest

from tests.helpers.process_pair import python

PROGRAM = """
from hypjax import command
from hypjax.system.caches import keep_compiled_programs
import warnings
warnings.showwarning = command._show_warning
keep_compiled_programs()
import jax
print(jax.jit(lambda x: x * 2 + 1)(jax.numpy.arange(3.0)))
"""


@pytest.mark.slow
def test_damaged_programs_are_reported_once_and_replaced(tmp_path, monkeypatch):
    for hidden in ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"):
        monkeypatch.delenv(hidden)

    def run():
        done = python("-c", PROGRAM, XDG_CACHE_HOME=str(tmp_path))
        assert done.stdout == "[1. 3. 5.]\n"
        return done.stderr

    assert run() == ""
    folder = tmp_path / "hypjax" / "compiled"
    written = {path: path.stat().st_size for path in folder.glob("jit_*-cache")}
    assert written
    for path in written:
        path.write_bytes(b"damaged")
    assert run() == f"warning: damaged programs in {folder} are compiled again\n"
    assert all(path.stat().st_size == size for path, size in written.items())
    assert run() == ""
