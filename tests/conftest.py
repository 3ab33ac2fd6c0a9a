"""Fixtures for all tests, and a compilation cache that their processes share."""

import gc
import os
import pathlib
import shutil
import tempfile

import jax
import numpy as np
import pytest
from jax._src import compiler
from PIL import Image

_CACHE = "JAX_COMPILATION_CACHE_DIR"
_IS_XDIST_WORKER = "PYTEST_XDIST_WORKER" in os.environ
# Most programs of the tests run for a moment, and compile faster without most optimisations. Those
# of these folders and modules run for longer, or must be what users run, down to the last bit.
_OPTIMISED = (
    "parity/test_benchmark",
    "parity/test_convolutions",
    "parity/test_timm",
    "data/test_device_cache",
    "integrations/test_engines",
    "integrations/test_euclidean",
    "integrations/test_qdrant",
    "integrations/test_shown_engine",
    "integrations/test_usearch",
    "geometry/test_layout",
    "retrieval/test_exactness",
)
# They compile in a third less time for narrower vectors, and in one piece instead of many. XLA's
# older emitters of fused operations, which JAX 0.11 lacks, halve it.
_QUICK = {"xla_cpu_max_isa": "AVX2", "xla_cpu_parallel_codegen_split_count": 1}
_USUAL = {"xla_cpu_max_isa": "", "xla_cpu_parallel_codegen_split_count": 32}
if jax.__version_info__ < (0, 11):
    _QUICK["xla_cpu_use_fusion_emitters"] = "false"
    _USUAL["xla_cpu_use_fusion_emitters"] = True
_QUICK_FLAGS = "".join(f" --{name}={value}" for name, value in _QUICK.items())


def pytest_configure(config):
    """Sets up a compilation cache for all tests and for the commands that they run.

    Other processes find it in the environment. It lasts for one run of pytest, unless the
    environment names a folder already.
    """
    if not _IS_XDIST_WORKER and _CACHE not in os.environ:
        folder = os.environ[_CACHE] = tempfile.mkdtemp(prefix="programs-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    if not _IS_XDIST_WORKER:
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + _QUICK_FLAGS
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


@pytest.fixture(scope="module", autouse=True)
def compilation(request):
    """Drops a module's programs from memory: they take gigabytes in all."""
    module = request.path.relative_to(request.config.rootpath / "tests").as_posix()
    quick = not module.startswith(_OPTIMISED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", str(quick))
        jax.config.update("jax_disable_most_optimizations", quick)
        if not quick:
            patch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"].replace(_QUICK_FLAGS, ""))
            patch.setattr(compiler, "get_compile_options", _as_usual)
        yield
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
def data_dir(tmp_path_factory) -> pathlib.Path:
    """A data folder with a tenth of the glyphs dataset, shared by all processes of pytest."""
    from hypjax.data.preparation import fonts
    from hypjax.data.preparation.prepare import prepared_folder
    from hypjax.system.locks import claimed

    root = tmp_path_factory.getbasetemp()
    directory = (root.parent if _IS_XDIST_WORKER else root) / "datasets"
    all_classes = fonts.glyph_classes
    with claimed(directory, "preparing glyphs"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(fonts, "glyph_classes", lambda: all_classes()[::10])
        prepared_folder("glyphs", str(directory))
    return directory


@pytest.fixture(scope="session")
def photos_folder(tmp_path_factory) -> pathlib.Path:
    """A folder of 10 classes with 6 small pictures each: noise around the colour of the class."""
    root = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for label in range(10):
        (root / f"class{label}").mkdir()
        colour = rng.integers(100, 156, 3)
        for i in range(6):
            height, width = rng.integers(20, 30, 2)
            noise = rng.integers(-90, 90, (height, width, 3))
            picture = np.clip(colour + noise, 0, 255).astype(np.uint8)
            Image.fromarray(picture).save(root / f"class{label}" / f"{i}.png")
    return root


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
