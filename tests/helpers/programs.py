"""Functions of a module as programs, which compile faster than each of their operations."""

import types

import jax


def compiled(module: types.ModuleType) -> types.SimpleNamespace:
    """Returns the public functions of a module, each jitted."""
    functions = {
        name: jax.jit(value)
        for name, value in vars(module).items()
        if isinstance(value, types.FunctionType) and value.__module__ == module.__name__
    }
    return types.SimpleNamespace(**functions)
