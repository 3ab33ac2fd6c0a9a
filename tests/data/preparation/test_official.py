"""Official datasets: folders, archives, downloads, and damaged lists."""

import gzip
import shutil
import tarfile

import pooch
import pytest

from hypjax.data.preparation.prepare import declared
from hypjax.errors import UserError
from tests.helpers import official_files as disk

WRITERS = {
    "cub200": disk.write_cub,
    "cars196": disk.write_cars,
    "sop": disk.write_sop,
    "inshop": disk.write_inshop,
    "omniglot": disk.write_omniglot,
    "grocery": disk.write_grocery,
}
# Folders of each dataset, and the official archives that contain them.
PACKED = {
    "cub200": {"CUB_200_2011": "CUB_200_2011.tgz"},
    "cars196": {"cars196/car_ims": "cars196/car_ims.tgz"},
    "sop": {"Stanford_Online_Products": "Stanford_Online_Products.zip"},
    "inshop": {"Inshop_Clothes/Img/img": "Inshop_Clothes/Img/img.zip"},
    "omniglot": {
        "images_background": "images_background.zip",
        "images_evaluation": "images_evaluation.zip",
    },
    "grocery": {"GroceryStoreDataset": "GroceryStoreDataset-master.zip"},
}


@pytest.fixture
def downloads(tmp_path):
    return tmp_path / "downloads"


def contents(found):
    """Returns what was found, in the form that the writers return."""
    return {
        split: [
            disk.Written(i.name, i.label, i.superlabel, found.tree.files[i.file].read_bytes())
            for i in part
        ]
        for split, part in found.images.items()
    }


def open_at(name, manual_dir, downloads):
    with declared(name).open(manual_dir, downloads) as found:
        return contents(found)


def error_at(name, manual_dir, downloads):
    """Returns the message of the error that opening raises."""
    with pytest.raises(UserError) as caught:
        open_at(name, manual_dir, downloads)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", WRITERS)
def test_the_official_folder_and_archives_list_the_same_images(name, tmp_path, downloads):
    written = WRITERS[name](tmp_path)
    for archive in PACKED[name].values():
        (tmp_path / archive).write_bytes(b"damaged, but not needed")
    assert open_at(name, tmp_path, downloads) == written
    assert not downloads.exists()
    for folder, archive in PACKED[name].items():
        disk.pack(tmp_path / folder, tmp_path / archive)
    assert open_at(name, tmp_path, downloads) == written
    assert not downloads.exists() or not list(downloads.iterdir())


def test_cars_are_split_by_class_whatever_their_order(tmp_path, downloads):
    written = disk.write_cars(tmp_path, classes=(100, 2, 98, 99))
    images = open_at("cars196", tmp_path, downloads)
    assert images["train"] == written["train"]
    assert images["test"] == written["test"][3:] + written["test"][:3]


def test_the_training_half_of_cars_is_split_by_class(tmp_path, downloads):
    written = disk.write_half_cars(tmp_path)
    disk.pack(tmp_path / "cars_train", tmp_path / "cars_train.tgz")
    disk.pack(tmp_path / "devkit", tmp_path / "car_devkit.tgz")
    with declared("cars196").parts["train"].open(tmp_path, downloads) as found:
        assert contents(found) == written
        assert all(image.box is None for part in found.images.values() for image in part)


@pytest.mark.parametrize(("list_in", "images_in"), [("Eval", ""), ("", "Img"), ("", "")])
def test_inshop_files_may_be_arranged_differently(list_in, images_in, tmp_path, downloads):
    written = disk.write_inshop(tmp_path)
    root = tmp_path / "Inshop_Clothes"
    (root / "Eval/list_eval_partition.txt").rename(root / list_in / "list_eval_partition.txt")
    (root / "Img/img").rename(root / images_in / "img")
    assert open_at("inshop", tmp_path, downloads) == written
    disk.pack(root / images_in / "img", root / images_in / "img.zip")
    assert open_at("inshop", tmp_path, downloads) == written


def test_the_small_sets_of_omniglot_share_no_alphabet_and_come_last(tmp_path, downloads):
    written = disk.write_omniglot(tmp_path, small=True)
    assert {image.superlabel for image in written["test"]} == {"Sanskrit", "Tagalog"}
    assert open_at("omniglot", tmp_path, downloads) == written
    complete = disk.write_omniglot(tmp_path)
    assert open_at("omniglot", tmp_path, downloads) == complete
    shutil.rmtree(tmp_path / "images_evaluation")
    assert open_at("omniglot", tmp_path, downloads) == complete | {"test": []}


# Dataset, list, number of a line, what it is replaced by, and part of the message.
DAMAGED_LINES = [
    ("sop", "Ebay_train.txt", 3, "2 1 4 ../x.JPG", "Ebay_train.txt, line 3: "),
    ("sop", "Ebay_train.txt", 3, "2 1 4 chair_final/110000000001_0.JPG", "is listed twice"),
    ("grocery", "dataset/val.txt", 1, "val/Fruit/Kiwi/a.jpg, 81, 3", "there is no product 81"),
    ("grocery", "dataset/classes.csv", 2, "A,1,A,0,/icons/Fruit/a.jpg,/a.txt", "classes.csv: "),
    ("cars196", "cars_annos.mat", 1, "MATLAB 5.0 MAT-file", "cars_annos.mat: "),
]


@pytest.mark.parametrize(("name", "file", "line", "text", "problem"), DAMAGED_LINES)
def test_a_damaged_list_is_named(name, file, line, text, problem, tmp_path, downloads):
    WRITERS[name](tmp_path)
    (path,) = tmp_path.glob(f"*/{file}")
    lines = path.read_text(errors="replace").splitlines()
    lines[line - 1] = text
    path.write_text("\n".join(lines) + "\n")
    sentence = error_at(name, tmp_path, downloads)
    assert sentence.startswith(str(tmp_path)) and problem in sentence and "damaged" in sentence


def test_lists_and_folders_may_come_from_elsewhere(tmp_path, downloads, capsys):
    """Windows line ends, a byte order mark, links, a missing image."""
    missing = "bicycle_final/110000000002_1.JPG"
    written = disk.write_sop(tmp_path / "elsewhere")
    root = (tmp_path / "elsewhere/Stanford_Online_Products").rename(tmp_path / "renamed")
    path = root / "Ebay_test.txt"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n") + b"\r\n")
    moved = (root / "chair_final").rename(tmp_path / "moved")
    (root / "chair_final").symlink_to(moved)
    (tmp_path / "link").symlink_to(root)
    assert open_at("sop", tmp_path / "link", downloads) == written
    (root / missing).unlink()
    written["train"] = [image for image in written["train"] if image.name != missing]
    assert open_at("sop", root, downloads) == written
    assert f"missing, such as {missing}" in capsys.readouterr().err


def test_what_is_missing_is_named_with_advice(tmp_path, downloads):
    sentence = error_at("sop", tmp_path, downloads)
    assert f"{tmp_path} has no files of sop" in sentence and "--manual_dir=FOLDER" in sentence
    assert "--manual_dir=FOLDER" in error_at("sop", None, downloads)
    disk.write_cars(tmp_path)
    shutil.rmtree(tmp_path / "cars196/car_ims")
    sentence = error_at("cars196", tmp_path, downloads)
    assert f"{tmp_path}/cars196 has no images of cars196" in sentence and "car_ims.tgz" in sentence
    (tmp_path / "cars196/cars_annos.mat").unlink()
    (tmp_path / "cars196/car_ims").mkdir()
    (tmp_path / "cars196/car_ims/1.jpg").touch()
    assert "lacks cars_annos.mat" in error_at("cars196", tmp_path, downloads)


def test_an_archive_that_cannot_be_unpacked_is_named_and_nothing_is_left(tmp_path, downloads):
    """Because it is damaged, or leads out of the folder."""
    written = disk.write_cub(tmp_path)
    path = disk.pack(tmp_path / "CUB_200_2011", tmp_path / "CUB_200_2011.tar")
    tar = path.rename(tmp_path / "CUB_200_2011.tgz")
    damaged = gzip.compress(tar.read_bytes())[:-100]
    left = downloads / ".cub200-unpacked/CUB_200_2011/images/001.Bird_1/left.jpg"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"by a process that was killed")
    assert open_at("cub200", tmp_path, downloads) == written
    with tarfile.open(tar, "a") as packed:
        packed.addfile(tarfile.TarInfo("../../escaped.jpg"))
    for content in (tar.read_bytes(), damaged):
        tar.write_bytes(content)
        assert error_at("cub200", tmp_path, downloads).startswith(f"cannot unpack {tar} to")
        assert not list(tmp_path.rglob("escaped.jpg")) and not list(downloads.iterdir())


@pytest.fixture
def downloaded(tmp_path, monkeypatch):
    """Omniglot's images, and the addresses and checksums of what is downloaded instead of them."""
    written, asked = disk.write_omniglot(tmp_path / "remote"), []

    def retrieve(url, known_hash, fname, path, progressbar):
        if not (path / fname).exists():
            asked.append((url, known_hash))
            path.mkdir(exist_ok=True)
            disk.pack(tmp_path / "remote" / fname.removesuffix(".zip"), path / fname)

    monkeypatch.setattr(pooch, "retrieve", retrieve)
    return written, asked


def test_archives_are_downloaded_once(downloaded, downloads):
    written, asked = downloaded
    published = [archive for archive in declared("omniglot").archives if archive.url]
    for unpacked in (False, False, True):
        for archive in published if unpacked else ():
            shutil.unpack_archive(downloads / archive.file, downloads)
            (downloads / archive.file).unlink()
        assert open_at("omniglot", None, downloads) == written
        assert asked == [(archive.url, f"sha256:{archive.sha256}") for archive in published]


@pytest.mark.parametrize(
    "error", [ValueError("SHA256 does not match"), OSError(28, "No space left on device")]
)
def test_a_failed_download_is_explained(error, downloads, monkeypatch):
    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr(pooch, "retrieve", fail)
    sentence = error_at("omniglot", None, downloads)
    assert sentence.startswith("cannot download http") and "--manual_dir" in sentence
    assert error.args[-1] in sentence
