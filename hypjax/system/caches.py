"""The user's cache folder; its content may be deleted at any time."""

import os
import pathlib


def cache_folder() -> pathlib.Path:
    """Returns this package's cache folder, ~/.cache/hypjax by default; it may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return pathlib.Path(base).expanduser() / "hypjax"


def keep_compiled_programs() -> None:
    """Enables JAX's persistent compilation cache, in the user's folder if JAX has one."""
    import jax

    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "compiled"))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        # Cache quick compilations too: a start has dozens of them, which add up to seconds.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
