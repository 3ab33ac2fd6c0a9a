"""Official datasets: folders, archives, downloads, and damaged lists."""

import contextlib
import functools
import gzip
import hashlib
import http.server
import shutil
import tarfile
import threading

import pytest

from hypjax.data.preparation.prepare import declared
from hypjax.errors import UserError
from tests.helpers import official_files as disk
from tests.helpers import small_runs
from tests.helpers.system_limits import small_disk

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
    written, half = disk.write_half_cars(tmp_path), declared("cars196").parts["train"]
    disk.pack(tmp_path / "cars_train", tmp_path / "cars_train.tgz")
    disk.pack(tmp_path / "devkit", tmp_path / "car_devkit.tgz")
    with half.open(tmp_path, downloads) as found:
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
    """Because it is damaged, leads out of the folder, or the disk is full."""
    written = disk.write_cub(tmp_path)
    path = disk.pack(tmp_path / "CUB_200_2011", tmp_path / "CUB_200_2011.tar")
    tar = path.rename(tmp_path / "CUB_200_2011.tgz")
    damaged = gzip.compress(tar.read_bytes())[:-100]
    left = downloads / ".cub200-unpacked/CUB_200_2011/images/001.Bird_1/left.jpg"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"by a process that was killed")
    assert open_at("cub200", tmp_path, downloads) == written
    with small_disk(tmp_path / "disk", "16k") as small:
        assert f"to {small} (No space left" in error_at("cub200", tmp_path, small)
        assert not list(small.iterdir())
    with tarfile.open(tar, "a") as packed:
        packed.addfile(tarfile.TarInfo("../../escaped.jpg"))
    for content in (tar.read_bytes(), damaged):
        tar.write_bytes(content)
        assert error_at("cub200", tmp_path, downloads).startswith(f"cannot unpack {tar} to")
        assert not list(tmp_path.rglob("escaped.jpg")) and not list(downloads.iterdir())


@contextlib.contextmanager
def served(folder):
    """Serves a folder; yields the server's address and the list of requested paths."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            asked.append(self.path)

    asked = []
    handler = functools.partial(Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        serving.start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()


def at_address(address, folder, checksum=None):
    """Returns Omniglot with other addresses, and the checksums of the files in a folder."""
    layout = declared("omniglot")
    moved = [
        archive._replace(
            url=f"{address}/{archive.file}",
            sha256=checksum or hashlib.sha256((folder / archive.file).read_bytes()).hexdigest(),
        )
        for archive in layout.archives
        if archive.url
    ]
    return layout._replace(archives=tuple(moved))


@pytest.fixture
def remote(tmp_path, monkeypatch):
    """A folder with Omniglot's archives, and their contents."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    written = disk.write_omniglot(tmp_path / "remote")
    for folder, archive in PACKED["omniglot"].items():
        disk.pack(tmp_path / "remote" / folder, tmp_path / "remote" / archive)
    return tmp_path / "remote", written


def test_archives_are_downloaded_once(remote, downloads, capfd):
    folder, written = remote
    with served(folder) as (address, asked):
        layout = at_address(address, folder)
        for _ in range(2):
            with layout.open(None, downloads) as found:
                assert contents(found) == written
    files = sorted(PACKED["omniglot"].values())
    assert asked == [f"/{file}" for file in files]
    assert sorted(path.name for path in downloads.iterdir()) == files
    assert capfd.readouterr().err.count("downloading") == len(files)
    for file in files:  # What is unpacked is not downloaded.
        shutil.unpack_archive(downloads / file, downloads)
        (downloads / file).unlink()
    with at_address("http://127.0.0.1:1", remote[0]).open(None, downloads) as found:
        assert contents(found) == written


def test_failed_downloads_are_explained_and_not_kept(remote, downloads, tmp_path):
    folder, _ = remote
    with served(folder) as (address, _), small_disk(tmp_path / "disk", "4k") as small:
        for layout, place, reason in (
            (at_address(address, folder, checksum="0" * 64), downloads, "does not match"),
            (at_address(address, folder), small, "No space left on device"),
            (at_address("http://127.0.0.1:1", folder), downloads, "127.0.0.1"),
        ):
            with pytest.raises(UserError) as caught, layout.open(None, place):
                pass
            assert not list(place.iterdir())
            sentence = str(caught.value)
            assert sentence.startswith("cannot download http")
            assert reason in sentence and "images_evaluation.zip from https://github" in sentence


def test_the_real_letters_share_no_alphabet(downloads):
    folder = small_runs.REPOSITORY.parent / "shared/data/omniglot"
    if not folder.exists():
        pytest.skip("the letters of shared/data are not here")
    train, test = open_at("omniglot", folder, downloads).values()
    assert [len(train), len({i.label for i in train})] == [2720, 136]
    assert [len(test), len({i.label for i in test})] == [2120, 106]
    assert not {i.superlabel for i in train} & {i.superlabel for i in test}
