"""Runs encoders whose weights stay as they are on a CPU, by an engine made for such programs.

XLA takes 1.2 to 2 times as long there as OpenVINO, in float32. What an engine cannot run, or runs
with other results, JAX runs.
"""

import hashlib
import importlib.util
import pathlib
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Shaped

from hypjax import __version__
from hypjax.errors import UserError, installation, reason, require_package
from hypjax.system import console, integrations
from hypjax.system.files import replacing

Function = Callable[[Any], Any]  # From a batch of images to their features.
# Increase the number if the translation changes, or an encoder's results.
FORMAT = "hypjax program 2", __version__, jax.__version__
_CHECKED = 8  # Images on which an engine is compared with JAX.
_MAX_ERRORS = {"float32": 1e-4, "bfloat16": 0.1}  # Relative to the largest number.
FEWEST = 1_000  # Images for which translating weights pays that will change again.


def choose(engine: str, mesh: Mesh) -> tuple[str, str] | None:
    """The engine for a mesh, and its precision; None for JAX.

    Args:
        engine: One of `hypjax.catalogue.ENGINES`.
        mesh: The devices; engines serve a single CPU.

    Raises:
        UserError: If the engine is named, but its package is missing or the mesh is another one.
    """
    name, _, precision = engine.partition(":")
    if name == "auto":
        is_installed = all(map(importlib.util.find_spec, integrations.packages("openvino")))
        return ("openvino", "float32") if _is_one_cpu(mesh) and is_installed else None
    if name == "jax":
        return None
    if not _is_one_cpu(mesh):
        devices = f"{mesh.devices.size} × {mesh.devices.flat[0].device_kind}"
        raise UserError(f"the engine {engine} runs on one CPU, not on {devices}; choose jax")
    for package in integrations.packages(name):
        require_package(package, f"the engine {name}", integrations.INTEGRATIONS[name].install)
    return name, precision or "float32"


def advise(engine: str, mesh: Mesh) -> None:
    """Says what would embed many images faster, if it is not installed."""
    if engine == "auto" and _is_one_cpu(mesh) and choose(engine, mesh) is None:
        command = installation(integrations.INTEGRATIONS["openvino"].install)
        console.say_once(f"on a CPU, OpenVINO embeds images faster than JAX: {command}")


def _is_one_cpu(mesh: Mesh) -> bool:
    return mesh.devices.size == 1 and mesh.devices.flat[0].platform == "cpu"


class Program:
    """A function of images that an engine runs, once it agrees with JAX on the first of them."""

    def __init__(
        self,
        engine: tuple[str, str],
        by_jax: Function,
        function: Function,
        example: jax.ShapeDtypeStruct,
        translation: pathlib.Path | None,
    ) -> None:
        """Opens nothing yet.

        `engine` is as from `choose`, `by_jax` the compiled function, and `function` is translated
        for an `example`, one image's shape and dtype. `translation` is the file of the result, but
        for the engine's name; None if it is not kept.
        """
        self._name, self._precision = engine
        self._by_jax, self._function, self._example = by_jax, function, example
        self._file = translation and translation.with_name(
            f"{translation.name}-{'-'.join(engine)}.onnx"
        )
        self.description = ""  # Of the engine, once it runs the function.
        self._run: Function | None = None
        self._lock = threading.Lock()

    def __call__(self, images: Shaped[Array, "b ..."]) -> Float[Any, "b ..."]:
        """Applies the function to a batch."""
        with self._lock:
            if self._run is None:
                self._run = self._open(np.asarray(images))
        return self._run(images)

    def _open(self, images: Shaped[np.ndarray, "b ..."]) -> Function:
        """Opens the engine's program, or JAX's where the engine cannot replace it."""
        try:
            open_program: Any = integrations.find("run", self._name)
            content = _read(self._file)
            if content is None:
                program = self._translated(open_program, images[:_CHECKED])
            else:
                program = open_program(content, self._precision)
        except Exception as error:  # Engines raise almost anything.
            problem = f"{self._name} does not run this encoder ({reason(error)})"
            console.say_once(f"{problem}; JAX runs it")
            return self._by_jax
        if self._precision != program.precision:
            console.warn_once(f"this processor has no {self._precision}: {program.description}")
        self.description = program.description
        console.say_once(f"{self.description} runs the encoder")
        return lambda images: program(np.asarray(images))

    def _translated(self, open_program: Any, images: Shaped[np.ndarray, "b ..."]) -> Any:
        """Translates the function, compares the program's results with JAX's, and keeps it."""
        content = open_program.translate(self._function, self._example)
        expected = np.asarray(self._by_jax(images))
        program = open_program(content, self._precision)
        error = np.abs(program(images) - expected).max() / max(np.abs(expected).max(), 1e-30)
        if not error <= _MAX_ERRORS[program.precision]:
            raise ValueError(f"its results differ by {error:.1g} of the largest number")
        if self._file is not None:
            with console.tolerating(f"the translated encoder {self._file}"):
                self._file.parent.mkdir(parents=True, exist_ok=True)
                with replacing(self._file) as temporary:
                    temporary.write_bytes(hashlib.sha256(content).digest() + content)
        return program


def _read(path: pathlib.Path | None) -> bytes | None:
    """Reads a kept translation; None if there is none, or it is damaged."""
    try:
        stored = path.read_bytes() if path is not None else b""
    except OSError:
        return None
    digest, content = stored[:32], stored[32:]
    return content if hashlib.sha256(content).digest() == digest else None
