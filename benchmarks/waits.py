"""Seconds that people wait for: whole commands, as they are typed, with cold and warm caches.

CPU seconds are user and system time of a command with its processes. The parts are seconds of its
main thread. The first start of a command is cold: its cache of compiled programs is empty.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks import job, measure
from hypjax.errors import Interrupted, UserError
from hypjax.system import console, exits

_PARTS = ("imports", "compilation", "reading", "computing", "drawing")
COLUMNS = {
    "command": "{name}",
    "caches": "{caches}",
    "CPU s": "{cpu:.1f}",
    "wall s": "{wall:.1f}",
    "peak GB": "{memory:.2f}",
    **{part: f"{{{part}:.1f}}" for part in _PARTS},
}
_PORT = 8765
_DIM = 1280  # Coordinates of EfficientNet-Lite0.
_PHOTOS, _CLASSES = 100, 10  # Photographs that are embedded.


def rows(options: measure.Options) -> Iterator[dict[str, Any]]:
    """A row for each command and state of its caches; with a tenth of the images if quick."""
    with (
        tempfile.TemporaryDirectory(prefix="hypjax-waits-") as temporary,
        exits.deferred("interrupted: finishing this command") as interrupted,
    ):
        folder, scale = pathlib.Path(temporary), 10 if options.quick else 1
        for label in range(_CLASSES):
            job.write_photos(folder / f"photos/{label}", 500, _PHOTOS // _CLASSES, [label])
        for name, images, classes in (("cars", 8144, 196), ("groceries", 5421, 81)):
            write_features(folder / f"{name}.npz", images // scale, classes)
        caches = _Caches(folder)
        for name, module, *arguments in _commands(folder):
            for state in ("cold", "warm"):
                if interrupted():
                    raise Interrupted("the remaining commands were not measured", interrupted())
                console.say(f"{name}, {state}")
                yield {"name": name, "caches": state, **caches.run(name, state, module, arguments)}
            if name == "embed 100 photos":
                _repeat_gallery(folder / "embed-100-photos-warm/gallery.npz", folder, 2323 // scale)


def write_features(path: pathlib.Path, images: int, classes: int) -> None:
    """Writes features of classes, around their centres."""
    rng = np.random.default_rng(0)
    labels = np.arange(images) % classes
    centres = rng.normal(size=(classes, _DIM))
    features = np.abs(centres[labels] + 2 * rng.normal(size=(images, _DIM))).astype(np.float16)
    np.savez(path, features=features, labels=labels)


def _repeat_gallery(path: pathlib.Path, folder: pathlib.Path, images: int) -> None:
    """Writes a larger gallery, of the same embeddings with noise."""
    with np.load(path) as file:
        arrays = dict(file)
    rows = np.arange(images) % len(arrays["ids"])
    rng = np.random.default_rng(0)
    for name, array in arrays.items():
        if array.shape[:1] == (len(arrays["ids"]),) and name != "ids":
            arrays[name] = array[rows]
    noise = 1 - 0.1 * rng.random((images, 1), np.float32)
    arrays["vectors"] = (arrays["vectors"] * noise).astype(np.float32)
    arrays["ids"] = np.array([f"{path.parent}/{row}.jpg" for row in range(images)])
    np.savez(folder / "gallery.npz", **arrays)


def _commands(folder: pathlib.Path) -> Iterator[tuple[str, ...]]:
    """Names of the rows, modules, and their arguments; OUT is a folder of its own."""
    photo, gallery = f"--query={folder}/photos/0/000.jpg", f"--gallery={folder}/gallery.npz"
    lite = ("--config=configs/folder.py:hyp-lite,frozen", "--config.model.weights=None")
    lite += (f"--config.data.path={folder}/photos", "--config.data.validation_classes=0")
    head = ("--config=configs/features.py:hyp", f"--config.data.path={folder}/groceries.npz")
    run, letters = f"--workdir={folder}/head-on-100-photos-warm", f"--workdir={folder}/letters-warm"
    yield "import hypjax", "hypjax"
    yield "score 8,144 features", "hypjax.score", f"--embeddings={folder}/cars.npz"
    yield "head on 5,421 features", "hypjax.main", *head, "--workdir=OUT"
    yield "head on 100 photos", "hypjax.main", *lite, "--workdir=OUT"
    images = f"--images={folder}/photos"
    yield "embed 100 photos", "hypjax.embed", run, images, "--output=OUT/gallery.npz"
    yield "search one photo among 2,323", "hypjax.search", run, gallery, photo
    yield (
        "disk of 2,323 images",
        "hypjax.plot",
        "disk",
        f"--embeddings={folder}/gallery.npz",
        ("--output=OUT/disk.png"),
    )
    yield "serve until ready", "hypjax.serve", run, gallery, f"--port={_PORT}"
    yield "letters", "hypjax.main", "--config=configs/glyphs.py", "--workdir=OUT"
    for state in ("cold", "warm"):  # A run that was killed before its last evaluation.
        copy = shutil.copytree(folder / "letters-warm", folder / f"letters-resumed-{state}")
        (copy / "results.json").unlink()
    yield "letters, resumed", "hypjax.main", "--config=configs/glyphs.py", "--workdir=OUT"
    yield "letters, dry run", "hypjax.main", "--config=configs/glyphs.py", "--dry_run"
    yield "report of the letters", "hypjax.report", letters, "--output=OUT/report.html"
    yield "convert the letters", "hypjax.convert", letters, "--output=OUT/letters.safetensors"


class _Caches:
    """Caches of programs, one for each command, which its second start finds."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder

    def run(self, name: str, state: str, module: str, arguments: Sequence[str]) -> dict[str, float]:
        """Runs a command, and returns what it took."""
        title = name.replace(",", "").replace(" ", "-")
        out = self._folder / f"{title}-{state}"
        parts = self._folder / f"{out.name}.json"
        out.mkdir(exist_ok=True)
        arguments = [argument.replace("OUT", str(out)) for argument in arguments]
        environment = os.environ | {"XDG_CACHE_HOME": str(self._folder / f"caches-{title}")}
        for name in ("JAX_COMPILATION_CACHE_DIR", "PYTHONDONTWRITEBYTECODE"):
            environment.pop(name, None)
        command = [sys.executable, "-m", "benchmarks.probe", str(parts), module, *arguments]
        started = time.perf_counter()
        with subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            process_group=0,  # An interrupt does not reach it.
        ) as process:
            if module == "hypjax.serve":
                _await_page(process)
                process.terminate()
            messages = process.stderr.read()
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode and module != "hypjax.serve":  # Which a signal ended.
            raise UserError(f"{name} failed: {messages.decode()[-500:]}")
        return {
            "cpu": used.ru_utime + used.ru_stime,
            "wall": time.perf_counter() - started,
            "memory": used.ru_maxrss / 1e6,
            **json.loads(parts.read_text()),
        }


def _await_page(process: subprocess.Popen) -> None:
    """Waits until a server answers, or ends."""
    while process.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{_PORT}").close()
        except OSError:
            time.sleep(0.05)
        else:
            return
