"""What may be thrown away at any time, in the user's cache folder."""

import os
import pathlib


def cache_folder() -> pathlib.Path:
    """The folder for this package's caches, which may not exist yet: ~/.cache/hypjax by default."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return pathlib.Path(base).expanduser() / "hypjax"


def keep_compiled_programs() -> None:
    """Lets JAX keep what it compiles, so that a second start need not compile it again.

    A folder that the user has named to JAX (JAX_COMPILATION_CACHE_DIR) is taken instead of ours.
    """
    import jax

    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "compiled"))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        # Also the quick ones: a start compiles dozens of them, which takes seconds.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
