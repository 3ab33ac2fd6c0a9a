"""Fixtures for all tests, and a compilation cache that all runs of pytest share."""

import gc
import os
import pathlib
import platform
import resource
import shutil
import sys

import jax
import jaxlib
import numpy as np
import pytest
from jax._src import compiler
from PIL import Image

from hypjax.system import machine

_CACHE = "JAX_COMPILATION_CACHE_DIR"
_QUICK_PROGRAMS = "JAX_DISABLE_MOST_OPTIMIZATIONS"
_MOST_ON_DISK, _MOST_IN_MEMORY = 2 * 2**30, 800 * 2**20  # Bytes of programs; of a process.
_IS_XDIST_WORKER = "PYTEST_XDIST_WORKER" in os.environ
# Most programs of the tests run for a moment, and compile faster without most optimisations. Those
# of these folders and modules run for longer, or must be what users run, down to the last bit.
_OPTIMISED = (
    "parity/test_benchmark",
    "parity/test_timm",
    "data/test_device_cache",
    "integrations/test_engines",
    "integrations/test_qdrant",
    "integrations/test_ann",
)
# They compile in a third less time for narrower vectors, and in one piece instead of many. XLA's
# older emitters of fused operations, which JAX 0.11 lacks, halve it.
_QUICK = {"xla_cpu_max_isa": "AVX2", "xla_cpu_parallel_codegen_split_count": 1}
_USUAL = {"xla_cpu_max_isa": "", "xla_cpu_parallel_codegen_split_count": 32}
if jax.__version_info__ < (0, 11):
    _QUICK["xla_cpu_use_fusion_emitters"] = "false"
    _USUAL["xla_cpu_use_fusion_emitters"] = True
_QUICK_FLAGS = "".join(f" --{name}={value}" for name, value in _QUICK.items())


def _programs_folder() -> pathlib.Path:
    """The folder of compiled programs, of this machine and these versions; old ones are removed."""
    base = (
        pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "hypjax-tests"
    )
    if sum(file.stat().st_size for file in base.rglob("*") if file.is_file()) > _MOST_ON_DISK:
        shutil.rmtree(base, ignore_errors=True)
    versions = f"jax{jax.__version__}-jaxlib{jaxlib.__version__}"
    return base / f"{platform.node()}-python{platform.python_version()}-{versions}"


def pytest_configure():
    """Sets up a compilation cache for all tests and for the commands that they run.

    Other processes find it in the environment.
    """
    if not _IS_XDIST_WORKER and _CACHE not in os.environ:
        os.environ[_CACHE] = str(_programs_folder())
    if not _IS_XDIST_WORKER:
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + _QUICK_FLAGS
    os.environ[_QUICK_PROGRAMS] = "true"
    jax.config.update("jax_disable_most_optimizations", True)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    # Programs are traced a tenth faster without the lines of Python behind their operations, and if
    # Python looks less often for garbage among the many objects of a trace.
    os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
    jax.config.update("jax_traceback_in_locations_limit", 0)
    gc.set_threshold(50_000, 10, 10)
    jax.config.update("jax_compilation_cache_dir", os.environ[_CACHE])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def pytest_xdist_auto_num_workers(config):
    """Returns the number of processes by default, unless --pdb is given."""
    del config
    return 2


def _as_usual(*args, env_options_overrides=None, options=compiler.get_compile_options, **more):
    overrides = _USUAL | (env_options_overrides or {})
    return options(*args, env_options_overrides=overrides, **more)


def _memory() -> int:
    """Bytes of memory that this process uses, or on systems without /proc has used at most."""
    statm = pathlib.Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@pytest.fixture(autouse=True)
def memory():
    """Returns freed memory to the system, and drops programs, before memory fills up."""
    if _memory() > _MOST_IN_MEMORY:
        machine.free_host_memory()
    if _memory() > _MOST_IN_MEMORY:
        jax.clear_caches()
        gc.collect()
        machine.free_host_memory()


@pytest.fixture(scope="module", autouse=True)
def compilation(request):
    """Compiles the programs of some modules as users do."""
    module = request.path.relative_to(request.config.rootpath / "tests").as_posix()
    rare = () if "not slow" in request.config.option.markexpr else ("retrieval/test_exactness",)
    if not module.startswith(_OPTIMISED + rare):
        yield
        return
    jax.clear_caches()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(_QUICK_PROGRAMS, "false")
        patch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"].replace(_QUICK_FLAGS, ""))
        patch.setattr(compiler, "get_compile_options", _as_usual)
        jax.config.update("jax_disable_most_optimizations", False)
        yield
    jax.config.update("jax_disable_most_optimizations", True)
    jax.clear_caches()


@pytest.fixture
def float64():
    """Enables float64 in JAX during a test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="session")
def repository() -> pathlib.Path:
    """The root folder of the repository."""
    return pathlib.Path(__file__).parents[1]


@pytest.fixture(scope="session")
def made_once(tmp_path_factory):
    """Calls make(folder), unless another process of pytest did, and returns the folder."""
    from hypjax.system.files import locked

    base = tmp_path_factory.getbasetemp()
    root = base.parent if _IS_XDIST_WORKER else base

    def made(name, make):
        with locked(root / "locks" / name, f"making {name}"):
            done = root / "locks" / name / "done"
            if not done.exists():
                make(root / name)
                done.touch()
        return root / name

    return made


@pytest.fixture(scope="session")
def data_dir(made_once) -> pathlib.Path:
    """A data folder with a twentieth of the glyphs dataset."""
    from hypjax.data.preparation import fonts
    from hypjax.data.preparation.prepare import prepared_folder

    def make(folder):
        letters = fonts.letters_of
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                fonts, "letters_of", lambda face: [c for c in letters(face) if c % 20 < 1]
            )
            some = fonts.glyph_classes.__wrapped__()
            patch.setattr(fonts, "glyph_classes", lambda: some)
            prepared_folder("glyphs", str(folder))

    return made_once("datasets", make)


@pytest.fixture(scope="session")
def photos_folder(made_once) -> pathlib.Path:
    """A folder of 10 classes with 6 small pictures each: noise around the colour of the class."""

    def make(root):
        rng = np.random.default_rng(0)
        for label in range(10):
            (root / f"class{label}").mkdir(parents=True)
            colour = rng.integers(100, 156, 3)
            for i in range(6):
                height, width = rng.integers(20, 30, 2)
                noise = rng.integers(-90, 90, (height, width, 3))
                picture = np.clip(colour + noise, 0, 255).astype(np.uint8)
                Image.fromarray(picture).save(root / f"class{label}" / f"{i}.png")

    return made_once("photos", make)


@pytest.fixture(scope="session")
def run(made_once, photos_folder) -> pathlib.Path:
    """A run on the photos that was interrupted after step 8 and then finished; only to be read."""
    from tests.helpers.small_runs import train_shared

    return made_once("run", lambda folder: train_shared(photos_folder, folder))


@pytest.fixture
def folder(repository, tmp_path, monkeypatch):
    """The current folder: a temporary one with the repository's configurations."""
    (tmp_path / "configs").symlink_to(repository / "configs")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def figures(monkeypatch):
    """The figures that are saved during a test."""
    from matplotlib.figure import Figure

    saved, save = [], Figure.savefig

    def saving(figure, *args, **options):
        saved.append(figure)
        return save(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", saving)
    return saved


@pytest.fixture(scope="session", autouse=True)
def caches(tmp_path_factory):
    """Gives the tests their own cache folder instead of the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("caches")))
        yield


@pytest.fixture
def load_glyphs(repository, data_dir):
    """Loads configs/glyphs.py, with a tiny model and few steps."""
    from hypjax.config import load_config
    from tests.helpers.small_runs import SHORT_GLYPHS

    def load(*overrides, variant="hyp"):
        spec = str(repository / f"configs/glyphs.py:{variant}")
        return load_config(spec, [*SHORT_GLYPHS, f"run.data_dir={data_dir}", *overrides])

    return load
