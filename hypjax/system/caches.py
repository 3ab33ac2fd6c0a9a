"""The user's cache folder, whose content may be deleted at any time."""

import os
import pathlib
from typing import Any

from hypjax.system import console


def cache_folder() -> pathlib.Path:
    """Returns hypjax's cache folder, ~/.cache/hypjax by default, which may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return pathlib.Path(base).expanduser() / "hypjax"


def keep_compiled_programs() -> None:
    """Enables JAX's compilation cache, in hypjax's cache folder unless the user named another."""
    import jax

    config: Any = jax.config  # Its type lists no options.
    if not config.jax_enable_compilation_cache:
        return
    folder = config.jax_compilation_cache_dir or str(cache_folder() / "compiled")
    try:
        if "://" not in folder:
            os.makedirs(folder, exist_ok=True)
    except OSError as error:  # JAX would warn of each program.
        problem = f"compiled programs cannot be kept in {folder} ({error.strerror})"
        console.warn(f"{problem}; set JAX_COMPILATION_CACHE_DIR to another folder")
        config.update("jax_enable_compilation_cache", False)
        return
    config.update("jax_compilation_cache_dir", folder)
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        # Cache quick compilations too: a start has dozens of them, which add up to seconds.
        config.update("jax_persistent_cache_min_compile_time_secs", 0)
