"""A whole run, from launch to final recall: CUB's recipe on made photos, twice.

The first run finds every cache empty, the second one finds what the first has left there. Both are
started as a user starts them, and tell their times in times.json.
"""

import concurrent.futures
import importlib.util
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
from ml_collections import ConfigDict
from PIL import Image

from hypjax.config import load_config, recipes, variant_error
from hypjax.errors import Interrupted, UserError
from hypjax.monitoring.stopwatch import PARTS, TIMES
from hypjax.system import console, interrupts
from hypjax.system.cores import usable_cores

RUNS = ("cold", "warm")

_NEEDED = {"grain": "grain", "orbax": "orbax-checkpoint"}  # Modules of a run, and their packages.
_OPERATIONS = 6e15  # Of a run: 200 steps of 900 images forth and back, and two evaluations.
_CORE_RATE = 5e10  # Operations a second of a good core.
_AGREE = 0.01  # Recalls of two runs; accelerators add in varying order.


class Size(NamedTuple):
    """How many photos are made.

    Attributes:
        classes: Of training, and as many of the test.
        train: Images.
        test: Images.
        width: Of a photo, in pixels, or the height of one that stands.
    """

    classes: int
    train: int
    test: int
    width: int


SIZES = {"cub": Size(100, 5864, 5924, 500), "quick": Size(6, 60, 60, 80)}


def get_config(variant: str = "cub") -> ConfigDict:
    """Returns the configuration of the runs: CUB's recipe, or a tiny one."""
    if variant not in SIZES:
        raise variant_error(variant, SIZES)
    config = recipes.hyp_vit(recipes.parse_variant("hyp-dino"))
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


def whole_runs(quick: bool, cache: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Makes photos, and trains on them twice by the command line.

    Args:
        quick: A tiny model and few photos.
        cache: The runs' `run.cache`.
        overrides: Further fields, such as 'run.microbatch=100'.

    Returns:
        For each of `RUNS` what times.json holds, the final recalls, and the seconds that the
        process took, seen from outside.

    Raises:
        UserError: A package is missing, the machine is too slow, or a run failed.
        Interrupted: An interrupt came.
    """
    _require_packages()
    if not quick:
        _require_accelerator()
    variant = "quick" if quick else "cub"
    fields = [f"run.cache={cache}", *overrides]
    message = "interrupted: waiting until the run has ended"
    with (
        tempfile.TemporaryDirectory(prefix="hypjax-job-") as made,
        interrupts.deferred(message) as interrupted,
    ):
        folder = pathlib.Path(made)
        (folder / "job.py").write_text("from hypjax.benchmarks.job import get_config\n")
        named = [f"data.path={folder / 'photos'}", *fields]
        load_config(f"{folder / 'job.py'}:{variant}", named)  # Tells of mistakes in fields.
        console.say(f"making {SIZES[variant].train + SIZES[variant].test} photos in {folder}")
        make_photos(folder / "photos", SIZES[variant])
        return {name: _run(folder, name, variant, fields, interrupted) for name in RUNS}


def _require_packages() -> None:
    missing = [package for name, package in _NEEDED.items() if not importlib.util.find_spec(name)]
    if missing:
        raise UserError(
            f"a whole run needs {' and '.join(missing)}: pip install {' '.join(missing)}"
        )


def _require_accelerator() -> None:
    """Refuses what would take days; another process asks, since the runs need the whole device."""
    asked = [sys.executable, "-c", "import jax; print(jax.default_backend())"]
    backend = subprocess.run(asked, stdout=subprocess.PIPE, text=True, check=False).stdout.split()
    if backend[-1:] == ["cpu"]:
        hours = len(RUNS) * _OPERATIONS / (_CORE_RATE * usable_cores()) / 3600
        raise UserError(
            f"JAX finds no accelerator here, where both runs would take about {hours:.0f} hours; "
            "try a tiny size with --quick"
        )


def make_photos(folder: pathlib.Path, size: Size) -> None:
    """Writes JPEGs, about as large in bytes as photos are: cuts from one scene for each class."""
    with concurrent.futures.ThreadPoolExecutor(usable_cores()) as pool:
        written = []
        for split, count in (("train", size.train), ("test", size.test)):
            for label in range(size.classes):
                place = folder / split / f"{split}_{label:03}"
                place.mkdir(parents=True)
                seed = [split == "test", label]
                images = len(range(label, count, size.classes))
                written.append(pool.submit(_write_class, place, images, size.width, seed))
        for outcome in written:
            outcome.result()


def _write_class(folder: pathlib.Path, count: int, width: int, seed: Sequence[int]) -> None:
    rng = np.random.default_rng(seed)
    side = width * 3 // 2
    coarse = Image.fromarray(rng.integers(0, 256, (36, 36, 3), np.uint8))
    scene = np.asarray(coarse.resize((side, side), Image.Resampling.BICUBIC), np.int16)
    grain = rng.normal(0, 12, scene.shape).astype(np.int16)
    scene = np.clip(scene + grain, 0, 255).astype(np.uint8)
    for i in range(count):
        height, across = int(width * rng.uniform(0.65, 0.85)), width
        if i % 5 == 0:
            height, across = across, height
        top, left = rng.integers(0, side - width + 1, 2)
        photo = Image.fromarray(scene[top : top + height, left : left + across])
        photo.save(folder / f"{i:03}.jpg", quality=90)


def _run(
    folder: pathlib.Path,
    name: str,
    variant: str,
    fields: Sequence[str],
    interrupted: interrupts.Interrupt,
) -> dict[str, Any]:
    """Trains by the command line, in a fresh folder, with caches that all runs share."""
    console.say(f"the {name} run")
    workdir = folder / name
    command = [
        *(sys.executable, "-m", "hypjax.main", f"--config={folder / 'job.py'}:{variant}"),
        *(f"--workdir={workdir}", f"--config.data.path={folder / 'photos'}"),
        *(f"--config.{field}" for field in fields),
    ]
    environment = os.environ | {"XDG_CACHE_HOME": str(folder / "caches")}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    started = time.monotonic()
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
        while (status := _wait(process)) is None:
            if interrupted():
                process.terminate()
    seconds = time.monotonic() - started
    if interrupted():
        raise Interrupted("the photos and the runs are removed", interrupted.status)
    if status:
        raise UserError(f"the {name} run ended with status {status}; it says above why")
    times = json.loads((workdir / TIMES).read_text())
    results = json.loads((workdir / "results.json").read_text())
    return {**times, "process_seconds": seconds, "final": results["final"]}


def _wait(process: subprocess.Popen[bytes]) -> int | None:
    """A second of waiting, after which interrupts are looked for."""
    try:
        return process.wait(timeout=1)
    except subprocess.TimeoutExpired:
        return None


def table(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """A line a part, as Markdown; warns where the runs do not end alike."""
    rows = [
        (f"{name}, s", [f"{run['seconds'][name]:.2f}" for run in runs.values()])
        for name in (*PARTS, "total")
    ]
    rows.append(("whole process, s", [f"{run['process_seconds']:.2f}" for run in runs.values()]))
    for words, field in (("host", "host_memory_peak"), ("device", "device_memory_peak")):
        rows.append((f"{words} memory, peak", [_size(run.get(field)) for run in runs.values()]))
    for words, field in (("compiled", "compiled"), ("read from the cache", "cached")):
        counts = [str(run["programs"][field]) for run in runs.values()]
        rows.append((f"programs {words}", counts))
    recalls = [run["final"]["head"]["recall@1"] for run in runs.values()]
    rows.append(("final recall@1 of the head", [f"{recall:.4f}" for recall in recalls]))
    if max(recalls) - min(recalls) > _AGREE:
        console.warn(f"the runs end with recalls that differ by more than {_AGREE}")
    titles = ["part", *runs]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    return "\n".join([*lines, *(f"| {name} | {' | '.join(cells)} |" for name, cells in rows)])


def _size(number: int | None) -> str:
    return "not told" if number is None else f"{number / 1e9:.2f} GB"
