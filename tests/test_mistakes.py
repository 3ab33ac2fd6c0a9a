"""User errors: each is reported in one sentence, with status 1, before anything compiles."""

import pathlib
import shutil
import subprocess
import tempfile

import jax
import pytest

from hypjax import errors, evaluate, train
from hypjax.data.splits import open_splits
from hypjax.training import states
from tests.helpers import small_runs
from tests.helpers.pictures import write_picture, write_pictures, write_table
from tests.helpers.system_limits import fill, ordinary_user, small_disk


@pytest.fixture
def mistake(capsys, monkeypatch):
    """Runs a mode, fails if anything is compiled, and returns the one error on stderr."""

    def mistake(path, *overrides, workdir="run", mode=train.train_and_evaluate, compiling=False):
        def compiles(*args, **kwargs):
            raise AssertionError("something was compiled")

        with monkeypatch.context() as patch, pytest.raises(SystemExit) as exit:
            if not compiling:
                patch.setattr(jax, "jit", compiles)
                patch.setattr(states, "create_state", compiles)
            with errors.reported():
                mode(small_runs.load(path, *overrides), workdir)
        assert exit.value.code == 1
        (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error: ")]
        return line.removeprefix("error: ")

    monkeypatch.chdir(tempfile.mkdtemp())
    return mistake


CLASSES = [f"{label}/{i}.png" for label in "abcdefgh" for i in "12"]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.batch_size=64", "is 64, 32 classes with 2 images each, but there are 4 training"),
        ("train.batch_size=64", "; set --config.train.batch_size=8 or less"),
        ("data.validation_classes=6", "is 6, 6 of 7 classes, but two must remain to train on; "),
        ("data.test_classes=0", "PHOTOS has no splits; set --config.data.test_classes=0.25, or "),
        ("data.path=/nowhere", "path is /nowhere, which is neither a folder, nor a .csv or .parq"),
    ],
)
def test_invalid_settings(mistake, photos_folder, override, words):
    assert words.replace("PHOTOS", str(photos_folder)) in mistake(photos_folder, override)


def test_empty_folder(mistake, tmp_path):
    (tmp_path / "a").mkdir()
    assert mistake(tmp_path).startswith(f"no images in sub-folders of {tmp_path} (.bmp")


def test_broken_images(mistake, tmp_path):
    """Each is named with its reason; of many, the first ones are."""
    write_pictures(tmp_path, CLASSES)
    for suffix in ("jpg", "png", "webp"):
        broken = tmp_path / f"a/3.{suffix}"
        write_picture(broken, size=(64, 64))
        broken.write_bytes(broken.read_bytes()[: broken.stat().st_size * 2 // 3])
        line = mistake(tmp_path)
        assert line.startswith(f"cannot read 1 of 17 images: {broken} (")
        assert line.endswith("); fix or remove them")
        broken.unlink()
    (tmp_path / "a/3.jpg").write_text("no image")
    assert f": {tmp_path}/a/3.jpg (not an image); fix or remove them" in mistake(tmp_path)
    for i in range(7):
        (tmp_path / f"a/broken{i}.jpg").write_bytes(b"")
    line = mistake(tmp_path)
    assert "cannot read 8 of 24 images" in line and "(and 3 more)" in line


def test_unreadable_file(mistake, open_folder):
    write_pictures(open_folder, CLASSES)
    (open_folder / "a/1.png").chmod(0)
    with ordinary_user():
        line = mistake(open_folder, workdir=open_folder / "run")
    assert f"cannot read 1 of 16 images: {open_folder}/a/1.png (Permission denied); fix" in line
    (open_folder / "a").chmod(0)
    with ordinary_user():
        line = mistake(open_folder, workdir=open_folder / "run")
    assert line == f"cannot read the folder {open_folder}/a: Permission denied"
    (open_folder / "a").chmod(0o755)


def test_unknown_folder_next_to_train(mistake, tmp_path):
    write_pictures(tmp_path, ["train/a/1.png", "train/b/1.png", "val/c/1.png", "test/d/1.png"])
    words = "has val next to train, which holds classes; splits must be named train, validation, "
    assert mistake(tmp_path).startswith(f"{tmp_path} {words}")


def table(tmp_path, *rows, header="path,label,split,superlabel"):
    path = tmp_path / "table.csv"
    path.write_text("\n".join([header, *rows]))
    return path


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        (["a/1.png,a,trian,"], "TABLE, row 1: split is trian; it must be one of train, valid"),
        (["a/1.png,,,"], "TABLE, row 1: no label"),
        (["a/1.png,a,train,", "a/2.png,a,,"], "TABLE, row 2: either all rows have a split or n"),
        (["a/1.png,a,,", "a/1.png,b,,"], "TABLE, row 2: a/1.png is already in row 1"),
        (["a/1.png,a,,x", "a/2.png,a,,y"], "TABLE, row 2: label a has the superlabel y here"),
        (["a/1.png,a,train,", "b/1.png,b,query,"], "TABLE has the splits query, train; it needs"),
        (["a/9.png,a,,", "b/1.png,b,,"], "cannot read 1 of 2 images: FOLDER/a/9.png (No such file"),
        ([], "TABLE has no rows"),
    ],
)
def test_invalid_tables(mistake, tmp_path, rows, line):
    path = table(write_pictures(tmp_path, CLASSES), *rows)
    line = line.replace("TABLE", str(path)).replace("FOLDER", str(tmp_path))
    assert mistake(path).startswith(f"{line}")


def test_table_without_a_column(mistake, tmp_path):
    path = table(tmp_path, "1.png,a", header="file,label")
    assert mistake(path) == f"{path} has no column path; its columns are file, label"
    path.write_bytes("path,label\n\xe9.png,a".encode("latin-1"))
    assert mistake(path) == f"cannot read {path}: save it as UTF-8"
    path = tmp_path / "table.parquet"
    path.write_bytes(b"no table")
    assert mistake(path).startswith(f"cannot read {path}: ")


def listed(root, names, splits=()):
    """Writes pictures and a table of them, perhaps with their splits; returns the table."""
    rows = [{"path": name, "label": name[0]} for name in names]
    if splits:
        rows = [row | {"split": split} for row, split in zip(rows, splits, strict=True)]
    return write_table(write_pictures(root, names) / "table.csv", rows)


def test_too_few_classes_or_matches(mistake, tmp_path):
    names, splits = [f"{label}/1.png" for label in "abcde"], ["train"] * 3 + ["test"] * 2
    path = listed(tmp_path, names[:4], splits[:4])
    line = mistake(path, "data.validation_classes=0")
    assert line == f"the test part of {path} has 1 class; it needs two or more"
    path = listed(tmp_path, names, splits)
    line = mistake(path, "data.validation_classes=0")
    assert line == f"no image in the test part of {path} has another image of its class to find"


def test_validation_on_the_test_classes(mistake, tmp_path):
    splits = ["train"] * 8 + ["validation", "test"] * 3 + ["test"] * 2
    path = listed(tmp_path, CLASSES, splits)
    words = "has 3 classes in both validation and test, such as e; the best model would be chosen "
    assert mistake(path).startswith(f"{path} {words}")


def test_a_missing_file_in_a_table_whose_other_files_are_cached(mistake, tmp_path):
    path = listed(tmp_path, CLASSES)
    open_splits(small_runs.load(path))
    with path.open("a") as file:
        file.write("no/such.png,a\n")
    words = f"cannot read 1 of 17 images: {tmp_path}/no/such.png (No such file or directory)"
    assert mistake(path) == f"{words}; fix or remove them"


def test_changed_images(mistake, tmp_path):
    """A run neither resumes with them nor evaluates its model on them."""
    write_pictures(tmp_path / "photos", CLASSES)
    overrides = "train.total_steps=6", "train.batch_size=4"
    small_runs.save_untrained(small_runs.load(tmp_path / "photos", *overrides), tmp_path / "run")
    changed = tmp_path / "photos/a/1.png"
    size = changed.stat().st_size
    write_picture(changed, colour=(10, 20, 31))
    assert changed.stat().st_size == size
    for mode in (evaluate.evaluate, train.train_and_evaluate):
        where = {"workdir": tmp_path / "run", "mode": mode, "compiling": True}
        line = mistake(tmp_path / "photos", *overrides, **where)
        assert line.startswith(f"the images have changed since the run in {tmp_path}/run")


def test_class_with_one_image(tmp_path, capsys):
    names = [name for name in CLASSES if name not in ("a/2.png", "b/2.png")]
    splits = ["train" if name[0] in "acdef" else "test" for name in names]
    path = listed(tmp_path, names, splits)
    open_splits(small_runs.load(path, "data.validation_classes=0"))
    assert "1 of 5 training classes have one image" in capsys.readouterr().err


def test_workdir_that_cannot_be_written(mistake, photos_folder, open_folder, tmp_path):
    pictures = shutil.copytree(photos_folder, open_folder / "pictures")
    pictures.chmod(0o755)
    (open_folder / "run").mkdir(mode=0o555)
    with ordinary_user():
        line = mistake(pictures, workdir=open_folder / "run")
    assert line == f"cannot write to {open_folder}/run (Permission denied)"
    with small_disk(tmp_path / "disk", "8k") as disk:
        fill(disk)
        line = mistake(photos_folder, workdir=disk / "run")
        assert line == f"cannot write to {disk}/run (No space left on device)"
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        line = mistake(photos_folder, workdir=disk / "run")
        assert line == f"cannot write to {disk}/run (Read-only file system)"


def test_evaluation_without_a_checkpoint(mistake, photos_folder):
    line = mistake(photos_folder, workdir="none", mode=evaluate.evaluate)
    assert line.startswith(f"{pathlib.Path('none').absolute()} holds no checkpoint; train first")
    assert not pathlib.Path("none").exists()


def test_out_of_memory_names_the_fields_to_lower(photos_folder, tmp_path, monkeypatch):
    def exhausted(*args, **kwargs):
        return lambda *args, **kwargs: jax.numpy.zeros(2**50)

    monkeypatch.setattr(train, "jit_train_step", exhausted)
    with pytest.raises(errors.UserError, match="out of memory on cpu; lower train.batch_size"):
        train.train_and_evaluate(small_runs.load(photos_folder), tmp_path)
