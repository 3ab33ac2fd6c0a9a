"""Whole runs from launch to final recall: CUB's recipe on synthetic photos, twice.

The first run starts with empty caches, the second one with those that the first has filled. Both
use the command line and report their times in times.json.
"""

import concurrent.futures
import contextlib
import functools
import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import UInt8
from ml_collections import ConfigDict
from PIL import Image

from benchmarks import measure
from hypjax.config import load_config, recipes, variant_error, variants
from hypjax.errors import Interrupted, UserError
from hypjax.monitoring.stopwatch import PARTS, TIMES
from hypjax.system import console, exits, machine

RUNS = ("cold", "warm")
_OPERATIONS = 6e15  # Per run: 200 steps of 900 images, forward and backward, and two evaluations.
_CORE_RATE = 5e10  # Operations per second of a fast core.
_TOLERANCE = 0.01  # Tolerance between the recalls of both runs; accelerators add in varying order.


class Size(NamedTuple):
    """Classes of training and as many of testing, images of both, and a photo's longer side."""

    classes: int
    train: int
    test: int
    width: int


SIZES = {"cub": Size(100, 5864, 5924, 500), "quick": Size(6, 60, 60, 80)}


def get_config(variant: str = "cub") -> ConfigDict:
    """Returns the configuration of the runs: CUB's recipe, or a tiny one."""
    if variant not in SIZES:
        raise variant_error(variant, SIZES)
    config = recipes.hyp_vit(variants.parse_variant("hyp-dino"))
    config.variant = variant
    config.data.name = "folder"
    config.data.resize = 256
    config.model.weights = None
    config.train.batch_size, config.train.samples_per_class = 900, 9
    config.train.total_steps = 200
    config.run.checkpoint_every = 50
    if variant == "quick":
        config.data.image_size, config.data.resize = 32, 36
        config.model.architecture = "vit"
        config.model.update({"patch_size": 8, "width": 32, "depth": 2, "num_heads": 2})
        config.train.batch_size, config.train.total_steps = 54, 8
        config.run.workers, config.run.checkpoint_every = 0, 4
    return config


def rows(options: measure.Options) -> dict[str, Any]:
    """Writes photos, and trains on them twice by the command line; on few photos if quick.

    Returns for each of `RUNS` the contents of times.json, the final recalls, and the duration of
    the whole process in seconds. Raises UserError if the machine is too slow or a run failed, and
    Interrupted if the user interrupts the runs.
    """
    variant = "quick" if options.quick else "cub"
    if not options.quick:
        _require_accelerator()
    fields = [f"run.cache={options.cache}", *options.overrides]
    message = "interrupted: ending the run"
    with (
        tempfile.TemporaryDirectory(prefix="hypjax-job-") as temporary,
        exits.deferred(message) as interrupted,
    ):
        folder = pathlib.Path(temporary)
        (folder / "job.py").write_text("from benchmarks.job import get_config\n")
        load_config(  # Reports invalid fields before any work is done.
            f"{folder / 'job.py'}:{variant}", [f"data.path={folder / 'photos'}", *fields]
        )
        console.say(f"writing {SIZES[variant].train + SIZES[variant].test} photos to {folder}")
        make_photos(folder / "photos", SIZES[variant])
        return {name: _run(folder, name, variant, fields, interrupted) for name in RUNS}


def _require_accelerator() -> None:
    """Refuses runs that would take days. Another process asks JAX, so as not to use the device."""
    command = [sys.executable, "-c", "import jax; print(jax.default_backend())"]
    backend = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    if backend[-1:] in ([], ["cpu"]):
        hours = len(RUNS) * _OPERATIONS / (_CORE_RATE * machine.usable_cores()) / 3600
        raise UserError(
            f"JAX finds no accelerator, and without one both runs take about {hours:.0f} hours; "
            "try --quick"
        )


def make_photos(folder: pathlib.Path, size: Size) -> None:
    """Writes JPEG files of about the size of photos: crops of one random scene per class."""
    splits, labels = zip(*itertools.product(("train", "test"), range(size.classes)), strict=True)
    with concurrent.futures.ThreadPoolExecutor(machine.usable_cores()) as pool:
        list(pool.map(functools.partial(_write_class, folder, size), splits, labels))


def _write_class(folder: pathlib.Path, size: Size, split: str, label: int) -> None:
    target = folder / split / f"{split}_{label:03}"
    target.mkdir(parents=True)
    rng = np.random.default_rng([split == "test", label])
    width, side = size.width, size.width * 3 // 2
    pixels = scene(rng, (36, 36), (side, side))
    for i in range(len(range(label, getattr(size, split), size.classes))):
        shape = int(width * rng.uniform(0.65, 0.85)), width
        if i % 5 == 0:  # Portrait format.
            shape = shape[::-1]
        top, left = rng.integers(0, side - width + 1, 2)
        photo = Image.fromarray(pixels[top : top + shape[0], left : left + shape[1]])
        photo.save(target / f"{i:03}.jpg", quality=90)


def scene(
    rng: np.random.Generator, spots: tuple[int, int], size: tuple[int, int]
) -> UInt8[np.ndarray, "height width 3"]:
    """Smooth colour spots with grain, which JPEG compresses like a photo."""
    coarse = Image.fromarray(rng.integers(0, 256, (*spots, 3), np.uint8))
    smooth = np.asarray(coarse.resize(size[::-1], Image.Resampling.BICUBIC), np.int16)
    grain = rng.normal(0, 12, smooth.shape).astype(np.int16)
    return np.clip(smooth + grain, 0, 255).astype(np.uint8)


def _run(
    folder: pathlib.Path,
    name: str,
    variant: str,
    fields: Sequence[str],
    interrupted: exits.Interrupt,
) -> dict[str, Any]:
    """Trains by the command line in a new folder, with caches that both runs share."""
    console.say(f"the {name} run")
    workdir = folder / name
    command = [
        *(sys.executable, "-m", "hypjax.main", f"--config={folder / 'job.py'}:{variant}"),
        *(f"--workdir={workdir}", f"--config.data.path={folder / 'photos'}"),
        "--config.run.report=False",
        *(f"--config.{field}" for field in fields),
    ]
    environment = os.environ | {"XDG_CACHE_HOME": str(folder / "caches")}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    started, status = time.monotonic(), None
    # In a group of its own, Ctrl-C does not reach the run, which would save a state and say so.
    options = dict(env=environment, stdout=subprocess.DEVNULL, process_group=0)
    options["preexec_fn"] = machine.end_with_parent
    with subprocess.Popen(command, **options) as process:
        while status is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(timeout=0.1)
            if interrupted():
                process.kill()
    seconds = time.monotonic() - started
    if interrupted():
        raise Interrupted("the photos and runs were removed", interrupted.status)
    if status:
        raise UserError(f"the {name} run failed with status {status}; see its message above")
    times = json.loads((workdir / TIMES).read_text())
    results = json.loads((workdir / "results.json").read_text())
    return {**times, "process_seconds": seconds, "final": results["final"]}


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Formats a Markdown table with one row per part; warns if the final recalls differ."""
    runs = rows.values()
    recalls = [run["final"]["head"]["recall@1"] for run in runs]
    if max(recalls) - min(recalls) > _TOLERANCE:
        console.warn(f"the final recalls of the runs differ by more than {_TOLERANCE}")
    parts = {
        f"{part}, s": [f"{run['seconds'][part]:.2f}" for run in runs] for part in (*PARTS, "total")
    }
    parts |= {
        "whole process, s": [f"{run['process_seconds']:.2f}" for run in runs],
        "host memory, peak": [_format_size(run.get("host_memory_peak")) for run in runs],
        "device memory, peak": [_format_size(run.get("device_memory_peak")) for run in runs],
        "programs compiled": [str(run["programs"]["compiled"]) for run in runs],
        "programs read from the cache": [str(run["programs"]["cached"]) for run in runs],
        "final recall@1 of the head": [f"{recall:.4f}" for recall in recalls],
    }
    return measure.markdown(["part", *rows], ([name, *cells] for name, cells in parts.items()))


def _format_size(number: int | None) -> str:
    return "unknown" if number is None else f"{number / 1e9:.2f} GB"
