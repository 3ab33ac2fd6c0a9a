"""The spine of a clone: who reads the configuration, and which files data pass on their way.

A way is followed in all threads, by the functions of hypjax that are entered: photos from the first
file that is read to the end of the train step's trace; a query through `Model.search`, with opening
the gallery; a file of features through `hypjax.score`, without what imports call.

Host copies of a photo are buffers of at least its view's size that a function holds or returns
before the step: arrays, Pillow's images and decoded bytes, with the decoder's output and the batch.
"""

import contextlib
import io
import itertools
import json
import pathlib
import runpy
import subprocess
import sys
import tempfile
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any
from unittest import mock

import numpy as np
from jax._src.core import trace_state_clean
from ml_collections import ConfigDict
from PIL import Image

import hypjax
from benchmarks import job, measure
from benchmarks.splats import splats
from hypjax.config import load_config

COLUMNS = {"count": "{count}", "measured": "{value}", "at most": "{bound}", "where": "{where}"}
_ROOT = pathlib.Path(__file__).parents[1] / "hypjax"
_READERS = ("__contains__", "__getattr__", "__getitem__", "__iter__", "get", "items", "iteritems")
_READERS += ("keys", "values", "to_dict", "to_json", "copy_and_resolve_references")
_SIDE, _BATCH = 16, 32  # Pixels, and photos: one piece of the input.
_SMALL = ("model.width=16", "model.depth=1", "model.num_heads=2", "model.head_dim=8")
_SMALL += ("eval.every=0", "run.report=False", "optim.warmup_steps=0")
_LETTERS = (*_SMALL, "train.total_steps=3", "train.batch_size=24")
_PHOTOS = (*_SMALL, "train.total_steps=1", f"train.batch_size={_BATCH}", "run.cache=none")
_PHOTOS += (f"data.image_size={_SIDE}", f"data.resize={_SIDE}", "model.patch_size=8")
_PHOTOS += ("train.samples_per_class=4", "data.validation_classes=0")
_DECODED = type(Image.new("L", (1, 1)).im)  # Memory of Pillow.


def rows(options: measure.Options) -> Iterator[dict[str, Any]]:
    """A row for each count: its value, its bound, and where it comes from."""
    del options
    with tempfile.TemporaryDirectory(prefix="hypjax-spine-") as temporary:
        for measured_rows in (_config_rows, _photo_rows, _score_rows):
            yield from measured_rows(pathlib.Path(temporary))
    files = [*_ROOT.rglob("*.py")]
    for kind, bound in (("dictionaries", 10), ("other locals", None)):
        counts = Counter({_name(x): [*splats(x)].count(bound is not None) for x in files})
        yield _row(f"splatted {kind}", bound, +counts, counts.total())


def _row(count: str, bound: int | None, where: Counter, value: int) -> dict[str, Any]:
    """A row; `where` counts files or kinds."""
    text = ", ".join(f"{name} {number}" for name, number in where.most_common())
    return {"count": count, "value": value, "bound": bound, "where": text}


def _name(path: str | pathlib.Path) -> str:
    """A file's name below hypjax/, or ''."""
    root, _, name = str(path).rpartition("/hypjax/")
    return name if root == str(_ROOT.parent) else ""


def _quietly(call: Callable[..., Any], *args: Any) -> None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        call(*args)


def _config_rows(folder: pathlib.Path) -> Iterator[dict[str, Any]]:
    """Counts reads of a configuration in a run of three steps, by the file that reads."""
    reads, traced = Counter(), Counter()

    def counting(read: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            if "ml_collections" not in frame.f_code.co_filename:  # Not one reader by another.
                names = (_name(x.f_code.co_filename) for x, _ in traceback.walk_stack(frame))
                reads[name := next(filter(None, names), "elsewhere")] += 1
                traced[name] += not trace_state_clean()
            return read(*args, **kwargs)

        return counted

    config = load_config("glyphs", _LETTERS)
    with contextlib.ExitStack() as patches:
        for name in _READERS:
            patched = counting(getattr(ConfigDict, name))
            patches.enter_context(mock.patch.object(ConfigDict, name, patched))
        _quietly(hypjax.train_and_evaluate, config, folder / "letters")
    others = Counter(
        {x: n for x, n in reads.items() if x.split("/")[0] not in ("config", "configs")}
    )
    yield _row("reads of the configuration", 400, reads, reads.total())
    yield _row("reads in functions that JAX traces", 0, +traced, traced.total())
    yield _row("modules that read it, outside config/", 1, others, len(others))


class _Way:
    """Follows functions of hypjax, and with `photos` the memory of pixels."""

    def __init__(self, *, photos: bool = False) -> None:
        self.photos, self.active = photos, not photos
        self.near_step = self.in_step = self.ended = False
        self.num_read = 0  # Photos.
        self.entered = Counter()  # Entries by file.
        self.buffers = {}  # Sizes and objects by address; kept, so that addresses are not reused.

    def follow(self, call: Callable[..., Any], *args: Any) -> None:
        """Calls a function, and follows what it calls in this thread and in those it starts."""
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        try:
            _quietly(call, *args)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            self.ended = True

    def open_photo(self, event: str, args: tuple[Any, ...]) -> None:
        """An audit hook: training begins after the last test photo before the step."""
        if event == "open" and str(args[0]).endswith(".jpg") and not self.near_step | self.ended:
            self.active = "/train/" in str(args[0])
            self.num_read = self.num_read + 1 if self.active else 0
            if not self.active:
                self.entered.clear()
                self.buffers.clear()

    def _profile(self, frame: FrameType, event: str, value: Any) -> None:
        self.near_step |= frame.f_code.co_qualname == "StepTraceAnnotation.__init__"
        if self.ended or not self.active:
            return
        if event == "call" and (name := _name(frame.f_code.co_filename)):
            tracing = not trace_state_clean()
            if threading.current_thread() is threading.main_thread():
                self.ended = self.in_step and not tracing
                self.in_step |= self.photos and self.near_step and tracing
            if not self.ended and (self.in_step or not tracing) and not _is_import(frame):
                caller = _name(frame.f_back.f_code.co_filename) if frame.f_back else name
                self.entered.update({caller or name, name})
        elif event == "return" and self.photos and not self.in_step:
            for x in (value, *frame.f_locals.values()):
                self._keep(x)

    def _keep(self, value: Any) -> None:
        if isinstance(value, Image.Image):  # `value.im` would load the image.
            value = vars(value).get("_im")
        while isinstance(value, np.ndarray) and isinstance(value.base, np.ndarray):
            value = value.base
        size = 0
        if isinstance(value, _DECODED):
            size = value.size[0] * value.size[1] * value.bands
        elif isinstance(value, np.ndarray) and value.ndim > 2 and value.base is None:
            size = value.nbytes
        elif isinstance(value, bytes) and not value.startswith(b"\xff\xd8"):  # No JPEG file.
            size = len(value)
        if size >= 3 * _SIDE**2:
            self.buffers[id(value)] = size, value


def _is_import(frame: FrameType) -> bool:
    """Whether an import calls a frame."""
    callers = (x.f_code.co_filename for x, _ in traceback.walk_stack(frame))
    return any(name.startswith("<frozen importlib") for name in callers)


def _photo_rows(folder: pathlib.Path) -> Iterator[dict[str, Any]]:
    """Follows a batch of photos to its loss, and a query through a saved gallery."""
    photos = folder / "photos"
    for label, split in itertools.product(range(8), ("train", "test")):
        job.write_photos(photos / f"{split}/{split}{label}", 64, 8, [label, split == "test"])
    config = load_config("folder.py:hyp-scratch", [*_PHOTOS, f"data.path={photos}"])
    way = _Way(photos=True)
    sys.addaudithook(way.open_photo)
    way.follow(hypjax.train_and_evaluate, config, folder / "run")
    yield _row("files from photos to their loss", 20, way.entered, len(way.entered))
    of_batches = [size >= _BATCH * 3 * _SIDE**2 for size, _ in way.buffers.values()]
    copies = sum(of_batches) + round(of_batches.count(False) / way.num_read)
    kinds = Counter(type(x).__name__ for _, x in way.buffers.values())
    yield _row(f"host copies of each of {way.num_read} photos", 4, kinds, copies)
    model = hypjax.load(folder / "run")
    model.gallery(photos / "test").save(folder / "gallery.npz")
    arguments = folder / "gallery.npz", photos / "test/test0/000.jpg"
    _quietly(model.search, *arguments)  # Compiles.
    way = _Way()
    way.follow(model.search, *arguments)
    yield _row("files from a query to its hits", 15, way.entered, len(way.entered))


def _score_rows(folder: pathlib.Path) -> Iterator[dict[str, Any]]:
    """Follows a file of features to its scores, in a process with the command's flags."""
    features = np.random.default_rng(0).normal(size=(200, 16)).astype(np.float32)
    np.savez(folder / "features.npz", features=features, labels=np.arange(200) // 10)
    flag = f"--embeddings={folder}/features.npz"
    yield json.loads(subprocess.check_output([sys.executable, "-m", "benchmarks.spine", flag]))


if __name__ == "__main__":
    scored = _Way()
    with contextlib.suppress(SystemExit):
        scored.follow(runpy.run_module, "hypjax.score", None, "__main__", True)
    print(
        json.dumps(_row("files from features to scores", 25, scored.entered, len(scored.entered)))
    )
