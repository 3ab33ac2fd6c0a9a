"""Engines that embed on CPUs in JAX's place: the same points, kept programs, fallbacks."""

import importlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from PIL import Image

import hypjax
from hypjax.config import load_config
from hypjax.dry_run import dry_run
from hypjax.errors import UserError
from hypjax.experiment import engines
from hypjax.inference import released as released_models
from hypjax.runs.files import STARTS, read_object
from tests.helpers import commands, small_runs
from tests.helpers.small_runs import REPOSITORY
from tests.helpers.texts import released, write_tokenizer

for package in ("onnx", "onnxruntime", "openvino"):
    pytest.importorskip(package, reason=f"needs {package}")
cpu_engines = importlib.import_module("hypjax.integrations.cpu_engines")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """An untrained run on letters, and a folder of pictures."""
    folder = tmp_path_factory.mktemp("run")
    config = load_config(f"{REPOSITORY}/configs/glyphs.py", [*small_runs.SHORT_GLYPHS])
    small_runs.save_untrained(config, folder / "run")
    rng = np.random.default_rng(0)
    (folder / "photos").mkdir()
    for i in range(20):
        coarse = Image.fromarray(rng.integers(0, 256, (4, 4, 3), np.uint8))
        coarse.resize((40, 40)).save(folder / "photos" / f"{i:02}.png")
    return folder


@pytest.fixture(autouse=True)
def said(monkeypatch, tmp_path):
    """Lines that are said; each test has a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    lines = []
    monkeypatch.setattr(engines.console, "say_once", lines.append)
    monkeypatch.setattr(engines.console, "warn_once", lines.append)
    return lines


def kept(tmp_path, cache="cache/hypjax"):
    return sorted((tmp_path / cache / "programs").glob("*"))


def points(run, engine):
    return hypjax.load(run / "run", engine=engine).embed(run / "photos")


@pytest.mark.parametrize("engine", ["auto", "openvino", "onnxruntime"])
def test_an_engine_has_jax_s_points_and_keeps_its_program(engine, run, tmp_path, said, monkeypatch):
    expected = points(run, "jax")
    assert not said and not kept(tmp_path)
    np.testing.assert_allclose(points(run, engine), expected, atol=2e-5)
    assert "in float32 runs the encoder" in said[0]
    (program,) = kept(tmp_path)
    content = program.read_bytes()
    program.write_bytes(content[:-9])  # Damaged, so made anew.
    np.testing.assert_allclose(points(run, engine), expected, atol=2e-5)
    assert program.read_bytes() == content
    monkeypatch.setattr(cpu_engines, "translate", None)  # The program is there.
    np.testing.assert_allclose(points(run, engine), expected, atol=2e-5)
    assert len(said) == 3


def test_an_engine_searches_the_gallery_of_another(run, tmp_path):
    used = "jax", "openvino", "onnxruntime"
    for engine in used:
        words = f"--workdir={run / 'run'}", f"--images={run / 'photos'}", f"--engine={engine}"
        commands.call("embed", *words, f"--output={tmp_path / engine}.npz")
    found = {
        (by, of): hypjax.load(run / "run", engine=by)
        .search(tmp_path / f"{of}.npz", str(run / "photos/03.png"), k=5)[0]
        .paths
        for by in used
        for of in used
    }
    assert len({tuple(paths) for paths in found.values()}) == 1


def test_jax_runs_what_an_engine_gets_wrong_or_does_not_know(run, tmp_path, said, monkeypatch):
    expected, right = points(run, "jax"), cpu_engines.OpenVinoProgram.__call__
    with monkeypatch.context() as patch:
        patch.setattr(cpu_engines.OpenVinoProgram, "__call__", lambda *x: right(*x) * 1.001)
        np.testing.assert_array_equal(points(run, "openvino"), expected)
    assert "results differ by 0.001 of the largest number); JAX runs it" in said[0]

    def refuse(*_):
        raise ValueError("the translation knows no sort")

    monkeypatch.setattr(cpu_engines, "translate", refuse)
    np.testing.assert_array_equal(points(run, "openvino"), expected)
    assert "does not run this encoder (the translation knows no sort)" in said[1]
    assert not kept(tmp_path)


def test_bfloat16_is_said_where_the_processor_lacks_it(run, said):
    expected = points(run, "jax")
    lengths = np.linalg.norm(expected, axis=1)
    for engine in ("openvino:bfloat16", "jax:bfloat16"):
        found = points(run, engine)
        assert np.all(np.linalg.norm(found - expected, axis=1) < 0.1 * lengths)
    has_units = "BF16" in importlib.import_module("openvino").Core().get_property(
        "CPU", "OPTIMIZATION_CAPABILITIES"
    )
    assert any("has no bfloat16" in line for line in said) != has_units
    assert not np.array_equal(found, expected)  # JAX rounds on any processor.


LOWEST = ",".join(
    f"model/encoder/{x}" for x in ("cls_token", "pos_embed", "patch_embed", "block_0")
)


@pytest.mark.parametrize("frozen", ["encoder", LOWEST])
def test_scores_before_and_after_training_do_not_depend_on_the_engine(frozen, tmp_path, said):
    scores, used = [], []
    for engine in ("jax", "openvino"):
        fields = [*small_runs.SHORT_GLYPHS, f"optim.frozen={frozen}", f"run.engine={engine}"]
        fields += [f"run.cache_dir={tmp_path / engine}", "train.cached_features=True"]
        fields += ["model.depth=2"]
        config = load_config(f"{REPOSITORY}/configs/glyphs.py", fields)
        results = hypjax.train_and_evaluate(config, tmp_path / f"run-{engine}")
        scores.append(jax.tree.leaves(results))
        used += read_object(tmp_path / f"run-{engine}" / STARTS)["engines"] or ["JAX"]
    np.testing.assert_allclose(*scores, atol=1e-3)
    assert used[0] == "JAX" and {*said} == {f"{used[1]} runs the encoder"}
    assert len(kept(tmp_path, "openvino")) == 1


def test_a_dry_run_times_the_engine_that_will_embed(said, monkeypatch, capsys):
    config = load_config(f"{REPOSITORY}/configs/glyphs.py", [*small_runs.SHORT_GLYPHS])
    for fewest, by_engine in ((10**6, False), (10, True)):
        monkeypatch.setattr(engines, "FEWEST", fewest)
        dry_run(config)
        assert any("runs the encoder" in line for line in said) == by_engine
    assert "embedding every image once" in capsys.readouterr().out


def test_texts_are_embedded_by_an_engine(tmp_path, said, monkeypatch):
    monkeypatch.setattr(released_models, "read_language_image", lambda _: released())
    write_tokenizer(tmp_path)
    (tmp_path / "meru.pth").write_bytes(b"weights")
    texts = ["a plum", "x", "the green apple", "a plum on a plate " * 9]
    by_jax, by_engine = (
        hypjax.load(tmp_path / "meru.pth", engine=engine).embed_texts(texts).vectors
        for engine in ("jax", "openvino")
    )
    np.testing.assert_allclose(by_engine, by_jax, rtol=1e-4, atol=2e-5)
    assert len(kept(tmp_path)) == len(said) >= 1  # A program for each length of texts.


def test_an_engine_that_is_named_must_be_there(run, said, monkeypatch):
    with pytest.raises(UserError, match="engine is 'tensorrt'; it must be auto, jax"):
        hypjax.load(run / "run", engine="tensorrt")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="openvino needs onnx: pip install"):
        points(run, "openvino")
    monkeypatch.setattr(engines, "FEWEST", 10)
    points(run, "auto")  # By JAX.
    assert "OpenVINO embeds images faster than JAX: pip install" in said[0] and len(said) == 1


def test_openvino_is_imported_without_its_telemetry():
    program = (
        "import os, sys; from hypjax.integrations import cpu_engines\\n"
        "os.register_at_fork(before=lambda: print('a process was started'))\\n"
        "cpu_engines._import_openvino(); print('openvino_telemetry' in sys.modules)"
    )
    command = [sys.executable, "-c", program.replace("\\n", "\n")]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"
