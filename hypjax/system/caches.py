"""The user's cache folder; its content may be deleted at any time."""

import contextlib
import os
import pathlib
import re
import warnings

from hypjax.system import console

# JAX's warning of an entry that it cannot read, which it neither removes nor replaces.
_DAMAGED = re.compile(r"Error reading persistent compilation cache entry for '([^']+)'")


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
    _replace_damaged_programs(pathlib.Path(jax.config.jax_compilation_cache_dir))


def _replace_damaged_programs(folder: pathlib.Path) -> None:
    """Removes entries that cannot be read as JAX warns of them, before it writes them again."""
    show, removed = warnings.showwarning, set()

    def show_or_remove(message: Warning | str, *args: object, **kwargs: object) -> None:
        found = _DAMAGED.match(str(message))
        if found is None:
            show(message, *args, **kwargs)
            return
        with contextlib.suppress(OSError):
            for entry in folder.glob(f"{found[1]}-*"):
                entry.unlink(missing_ok=True)
        if not removed:
            console.warn(f"damaged programs in {folder} are compiled again")
        removed.add(found[1])

    warnings.showwarning = show_or_remove
    warnings.filterwarnings("always", _DAMAGED.pattern)
