"""Users' mistakes, which are refused in one sentence."""

import tempfile

import jax
import pytest
from jax.errors import JaxRuntimeError

from hypjax import errors, evaluate, train
from hypjax.assemble import assemble_training, open_splits
from hypjax.dry_run import dry_run
from hypjax.runs.workdir import saved_config
from hypjax.system import machine
from tests.helpers import small_runs
from tests.helpers.pictures import write_picture, write_pictures, write_table

CLASSES = [f"{label}/{i}.png" for label in "abcdefgh" for i in "12"]


@pytest.fixture
def mistake(monkeypatch):
    """Trains or evaluates, and returns the error."""

    def mistake(path, *overrides, workdir="run", mode=train.train_and_evaluate):
        with pytest.raises(errors.UserError) as error:
            mode(small_runs.load(path, *overrides), workdir)
        return str(error.value)

    monkeypatch.chdir(tempfile.mkdtemp())
    return mistake


def test_settings_and_folders_that_cannot_be_used(mistake, photos_folder, tmp_path):
    assert "at most 8" in mistake(photos_folder, "train.batch_size=64")
    assert "no images" in mistake(tmp_path)


def test_missing_weights_are_reported_before_images_are_opened(mistake):
    missing = "/nowhere", "model.weights=missing.safetensors"
    for mode in (
        train.train_and_evaluate,
        lambda config, _: dry_run(config),
        lambda config, _: evaluate.pretrained_features(config),
    ):
        assert "missing.safetensors: neither a file, nor a run" in mistake(*missing, mode=mode)


def test_images_that_cannot_be_read_are_named(mistake, tmp_path, capsys):
    write_pictures(tmp_path, CLASSES)
    broken = tmp_path / "a/3.jpg"
    write_picture(broken, size=(64, 64))
    broken.write_bytes(broken.read_bytes()[: broken.stat().st_size * 2 // 3])
    error = mistake(tmp_path)
    assert f"cannot read 1 of 17 images: {broken} (" in error and "data.skip_corrupt=True" in error
    for _ in range(2):  # The second time, the cache has the others.
        splits = open_splits(small_runs.load(tmp_path, "data.skip_corrupt=True"))
        assert len(splits.train) + len(splits.validation) + len(splits.test) == 16
        assert f"cannot read 1 of 17 images: {broken} (" in capsys.readouterr().err
    for path in tmp_path.glob("*/*"):
        path.write_bytes(b"no image")
    assert "cannot read 17 of 17 images" in mistake(tmp_path, "data.skip_corrupt=True")


def test_tables_that_cannot_be_used(mistake, tmp_path):
    path = write_pictures(tmp_path, CLASSES) / "table.csv"
    for text, sentence in (
        ("path,label,split\na/1.png,a,train\nb/1.png,b,query\n", "query, train"),
        ("path,label\na/9.png,a\nb/1.png,b\n", "a/9.png (No such file"),
    ):
        path.write_text(text)
        assert sentence in mistake(path)


def test_splits_in_which_nothing_can_be_found(mistake, tmp_path, capsys):
    def table(names, splits):
        rows = [{"path": n, "label": n[0], "split": s} for n, s in zip(names, splits, strict=True)]
        return write_table(write_pictures(tmp_path, names) / "table.csv", rows)

    single, few = [f"{label}/1.png" for label in "abcde"], "data.validation_classes=0"
    path = table(single, ["train"] * 3 + ["test"] * 2)
    assert "each class in the test part of " in mistake(path, few)
    path = table([*CLASSES, "i/1.png"], ["train"] * 8 + ["test"] * 8 + ["train"])
    assemble_training(small_runs.load(path, few))
    assert "1 of 5; such an image is compared with itself" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    [
        JaxRuntimeError("INTERNAL: Generated function failed: Out of memory allocating 64 bytes."),
        JaxRuntimeError("RESOURCE_EXHAUSTED: Failed to allocate request for 2.0GiB on device"),
        JaxRuntimeError("INTERNAL: YNNPACK operation failed"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes"),
        MemoryError("Unable to allocate 128. GiB for an array with shape (17179869184,)"),
        MemoryError(),
    ],
)
def test_exhausted_memory_is_explained_in_a_sentence(error, capsys):
    with pytest.raises(errors.UserError, match="out of memory on .*; lower run.eval_batch_size"):
        with machine.memory_explained("run.eval_batch_size"):
            raise error
    with pytest.raises(SystemExit, match="1"), errors.reported():
        raise error
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: out of memory (") and "; lower the batch size, or" in line
    for other in (JaxRuntimeError("INVALID_ARGUMENT: shapes differ"), RuntimeError("no memory")):
        with pytest.raises(RuntimeError, match=str(other)), errors.reported():
            with machine.memory_explained("run.eval_batch_size"):
                raise other


@pytest.mark.slow
def test_out_of_memory_names_the_fields_to_lower(run, tmp_path, monkeypatch):
    def exhausted(*args, **kwargs):
        return lambda *args, **kwargs: jax.numpy.zeros(2**50)

    monkeypatch.setattr("hypjax.training.loop.jit_train_step", exhausted)
    with pytest.raises(errors.UserError, match="out of memory on cpu; lower train.batch_size"):
        train.train_and_evaluate(saved_config(run), tmp_path)  # Its programs are compiled.
