"""Official datasets: folders, archives, downloads, and damaged lists."""

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import http.server
import os
import pathlib
import re
import shutil
import tarfile
import threading

import pytest

from hypjax.data.preparation import sources
from hypjax.data.preparation.official import Count
from hypjax.data.preparation.registry import OFFICIAL_DATASETS
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
    "grocery_icons": functools.partial(disk.write_grocery, icons=True),
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
    "grocery_icons": {"GroceryStoreDataset": "GroceryStoreDataset-master.zip"},
}


@pytest.fixture
def downloads(tmp_path):
    return tmp_path / "downloads"


def contents(found):
    """Returns what was found, in the form that the writers return."""
    return {
        split: [disk.Written(i.name, i.label, i.superlabel, found.tree.read(i.file)) for i in part]
        for split, part in found.images.items()
    }


def open_at(name, manual_dir, downloads):
    with OFFICIAL_DATASETS[name].open(manual_dir, downloads) as found:
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


def test_home_is_expanded_and_links_are_followed(tmp_path, downloads, monkeypatch):
    written = disk.write_cub(tmp_path / "elsewhere")
    (tmp_path / "home").mkdir()
    (tmp_path / "home/CUB_200_2011").symlink_to(tmp_path / "elsewhere/CUB_200_2011")
    images = tmp_path / "elsewhere/CUB_200_2011/images"
    moved = (images / "001.Bird_1").rename(tmp_path / "moved")
    (images / "001.Bird_1").symlink_to(moved)
    (moved / "endless").symlink_to(moved)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert open_at("cub200", pathlib.Path("~"), downloads) == written


def test_folders_without_the_datasets_names_are_not_walked(tmp_path, downloads, monkeypatch):
    """The dataset's own folder may have any name."""
    written = disk.write_sop(tmp_path)
    walked, walk = [], sources.walk
    monkeypatch.setattr(sources, "walk", lambda path: walked.append(path.name) or walk(path))
    for folder in ("private", "Stanford_Online_Products/private", "lamp_final"):
        (tmp_path / folder).mkdir()
    assert open_at("sop", tmp_path, downloads) == written
    assert sorted(walked) == ["bicycle_final", "chair_final"]
    renamed = (tmp_path / "Stanford_Online_Products").rename(tmp_path / "renamed")
    assert open_at("sop", renamed, downloads) == written


def test_unreadable_files_raise_an_oserror(tmp_path, downloads):
    disk.write_omniglot(tmp_path)
    content = (tmp_path / "images_background/Greek/character01/0003_01.png").read_bytes()
    archive = disk.pack(tmp_path / "images_background", tmp_path / "images_background.zip")
    archive.write_bytes(archive.read_bytes().replace(content, content[:-9] + b"a" * 9))
    (tmp_path / "images_evaluation/Oriya/character01/0011_01.png").unlink()
    (tmp_path / "images_evaluation/Oriya/character01/0011_01.png").symlink_to("nowhere")
    refused = []
    with OFFICIAL_DATASETS["omniglot"].open(tmp_path, downloads) as found:
        for image in (image for part in found.images.values() for image in part):
            try:
                found.tree.read(image.file)
            except OSError:
                refused.append(image.name)
    assert refused == [
        "images_background/Greek/character01/0003_01.png",
        "images_evaluation/Oriya/character01/0011_01.png",
    ]


def test_cub_without_lists_uses_its_folders(tmp_path, downloads):
    written = disk.write_cub(tmp_path, labels=False)
    assert open_at("cub200", tmp_path, downloads) == written
    (tmp_path / "CUB_200_2011/images.txt").unlink()
    assert open_at("cub200", tmp_path, downloads) == written


def test_cars_are_split_by_class_whatever_their_order_and_names(tmp_path, downloads, monkeypatch):
    written = disk.write_cars(tmp_path, classes=(100, 2, 98, 99), names=False)
    images = open_at("cars196", tmp_path, downloads)
    assert images["train"] == written["train"]
    assert images["test"] == written["test"][3:] + written["test"][:3]
    assert images["test"][0].label == "099"
    monkeypatch.setattr(disk, "_car", lambda number: "Car" if number < 3 else f"Car {number}")
    disk.write_cars(tmp_path, images=1)
    images = open_at("cars196", tmp_path, downloads)
    assert [image.label for image in images["train"]] == ["Car (1)", "Car (2)"]


@pytest.mark.parametrize("archive", ["car_devkit.tgz", "cars_devkit.tgz"])
def test_the_training_half_of_cars_is_split_by_class(archive, tmp_path, downloads):
    written, half = disk.write_half_cars(tmp_path), OFFICIAL_DATASETS["cars196"].parts["train"]
    disk.pack(tmp_path / "cars_train", tmp_path / "cars_train.tgz")
    disk.pack(tmp_path / "devkit", tmp_path / archive)
    with half.open(tmp_path, downloads) as found:
        assert contents(found) == written
        assert all(image.box is None for part in found.images.values() for image in part)


def test_another_first_half_of_a_department_is_named(tmp_path, downloads):
    disk.write_grocery(tmp_path)
    classes = tmp_path / "GroceryStoreDataset/dataset/classes.csv"
    classes.write_text(classes.read_text().replace(",Kiwi,", ",Grape,"))
    sentence = error_at("grocery", tmp_path, downloads)
    assert sentence.startswith(f"{classes}: the first half of Fruit") and "Kiwi" in sentence


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


def test_lists_may_have_windows_line_ends_and_a_byte_order_mark(tmp_path, downloads):
    written = disk.write_sop(tmp_path)
    path = tmp_path / "Stanford_Online_Products/Ebay_test.txt"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n") + b"\r\n")
    assert open_at("sop", tmp_path, downloads) == written


# Dataset, list, number of a line, what it is replaced by, and part of the message.
DAMAGED_LINES = [
    ("cub200", "images.txt", 3, "3 002.Bird_2/../../x.jpg", "is not of the form"),
    ("cub200", "images.txt", 3, "3 001.Bird_1/..", "points outside"),
    ("cub200", "images.txt", 3, "3 001.Bird_1/Bird_1_0001.jpg", "is listed twice"),
    ("cub200", "images.txt", 3, "3 201.Bird_1/a.jpg", "no class 201"),
    ("cub200", "images.txt", 3, "99 001.Bird_1/Bird_1_0000.jpg", "has no class in image_class"),
    ("cub200", "images.txt", 3, "4 001.Bird_1/Bird_1_0000.jpg", "has class 2 in image_class"),
    ("sop", "Ebay_test.txt", 2, "10 11319 4 ../chair_final/1.JPG", "is not of the form"),
    ("inshop", "Eval/list_eval_partition.txt", 5, "img/M/D/i/1.jpg i both", "'both' is not one of"),
    ("inshop", "Eval/list_eval_partition.txt", 5, "/img/M/D/i/1.jpg i train", "of the form"),
    ("inshop", "Eval/list_eval_partition.txt", 5, "img/../../i/1.jpg i train", "points outside"),
    ("inshop", "Eval/list_eval_partition.txt", 1, "19", "declares 19 images but lists 18"),
    ("grocery", "dataset/train.txt", 1, "train/Fruit/Kiwi/a.jpg 41 3", "is not of the form"),
    ("grocery", "dataset/val.txt", 1, "val/Fruit/Kiwi/a.jpg, 81, 3", "there is no product 81"),
    ("grocery", "dataset/val.txt", 1, "val/Fruit/a.jpg, 0, 1", "is in Fruit, coarse class 0"),
    ("grocery", "dataset/val.txt", 1, "val/Packages/a.jpg, 0, 0", "is in Fruit, coarse class 0"),
    ("grocery", "dataset/classes.csv", 2, "A,1,A,0,/icons/Fruit/a.jpg,/a.txt", "is not number 0"),
    ("grocery", "dataset/classes.csv", 2, "A,0,A,0,/icons/Fish/a.jpg,/a.txt", "no department"),
]


@pytest.mark.parametrize(("name", "file", "line", "text", "problem"), DAMAGED_LINES)
def test_a_damaged_line_is_named(name, file, line, text, problem, tmp_path, downloads):
    WRITERS[name](tmp_path)
    (path,) = tmp_path.glob(f"*/{file}")
    lines = path.read_text().splitlines()
    lines[line - 1] = text
    path.write_text("\n".join(lines) + "\n")
    sentence = error_at(name, tmp_path, downloads)
    named = path.with_name("images.txt") if "image_class" in problem else path
    assert sentence.startswith(f"{named}, line {line}: ") and problem in sentence


# Dataset, list, its content, and part of the message; None for half of its content.
DAMAGED_LISTS = [
    ("cub200", "images.txt", b"1 001.\xff/a.jpg", "is not a text file"),
    ("sop", "Ebay_train.txt", b"<html>", "does not begin with"),
    ("inshop", "Eval/list_eval_partition.txt", b"many\nimages", "does not begin with a count"),
    ("cars196", "cars_annos.mat", b"MATLAB 5.0 MAT-file" + bytes(500), "is damaged"),
    ("cars196", "cars_annos.mat", None, "is damaged"),
    (
        "grocery",
        "dataset/classes.csv",
        b"h\nA,0,A,0,/i/Fruit/a.jpg,/a.txt",
        "lists 1 products in 1",
    ),
]


@pytest.mark.parametrize(("name", "file", "content", "problem"), DAMAGED_LISTS)
def test_a_damaged_list_is_named(name, file, content, problem, tmp_path, downloads):
    WRITERS[name](tmp_path)
    (path,) = tmp_path.glob(f"*/{file}")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if content is None else content)
    sentence = error_at(name, tmp_path, downloads)
    assert sentence.startswith(str(path)) and problem in sentence and "fetch it" in sentence


def test_annotations_of_other_or_repeated_cars_are_named(tmp_path, downloads):
    disk.write_cars(tmp_path, classes=(1, 197), names=False)
    assert "annotation 4: there is no class 197" in error_at("cars196", tmp_path, downloads)
    rows = [(f"car_ims/00000{i}.jpg", number, 0) for i, number in ((2, 1), (1, 1), (2, 2))]
    disk.write_annotations(tmp_path / "cars196/cars_annos.mat", rows, names=False)
    sentence = error_at("cars196", tmp_path, downloads)
    assert "annotation 3: 'car_ims/000002.jpg' is listed twice" in sentence


def test_what_is_missing_is_named_with_advice(tmp_path, downloads):
    sentence = error_at("sop", tmp_path, downloads)
    assert f"{tmp_path} contains no files of sop" in sentence and "--manual_dir=FOLDER" in sentence
    assert f"no folder {tmp_path}/none" in error_at("sop", tmp_path / "none", downloads)
    sentence = error_at("sop", None, downloads)
    assert "sop cannot be downloaded" in sentence and "--manual_dir=FOLDER" in sentence
    written = disk.write_sop(downloads)
    assert open_at("sop", None, downloads) == written
    disk.write_inshop(tmp_path)
    root, file = tmp_path / "Inshop_Clothes", "Eval/list_eval_partition.txt"
    (root / file).unlink()
    assert f"{root} lacks {file}" in error_at("inshop", tmp_path, downloads)
    disk.write_cars(tmp_path)
    shutil.rmtree(tmp_path / "cars196/car_ims")
    sentence = error_at("cars196", tmp_path, downloads)
    assert f"{tmp_path}/cars196 has no images of cars196" in sentence and "car_ims.tgz" in sentence


def test_listed_images_without_a_file_are_left_out_and_named(tmp_path, downloads, capsys):
    missing = ["images/001.Bird_1/Bird_1_0001.jpg", "images/101.Bird_101/Bird_101_0000.jpg"]
    written = disk.write_cub(tmp_path, missing=missing)
    assert [len(part) for part in written.values()] == [5, 5]
    assert open_at("cub200", tmp_path, downloads) == written
    warning = f"warning: listed but missing: {missing[0]}, and 1 more\n"
    assert capsys.readouterr().err == warning


def test_cars_without_their_list_are_rejected_before_unpacking(tmp_path, downloads, capsys):
    disk.write_cars(tmp_path)
    disk.pack(tmp_path / "cars196/car_ims", tmp_path / "cars196/car_ims.tgz")
    (tmp_path / "cars196/cars_annos.mat").unlink()
    sentence = error_at("cars196", tmp_path, downloads)
    assert "lacks cars_annos.mat, which lists the images" in sentence
    assert "unpacking" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("archive", "keep"),
    [("CUB_200_2011.tgz", 0.5), ("CUB_200_2011.zip", 0), ("CUB_200_2011.zip", 0.5)],
)
def test_a_damaged_archive_is_named(archive, keep, tmp_path, downloads):
    disk.write_cub(tmp_path)
    path = disk.pack(tmp_path / "CUB_200_2011", tmp_path / archive)
    path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])
    assert f"{path} is damaged" in error_at("cub200", tmp_path, downloads)
    assert not downloads.exists() or not list(downloads.iterdir())


def test_encrypted_archives_are_rejected_before_anything_is_read(tmp_path, downloads):
    disk.write_inshop(tmp_path)
    folder = tmp_path / "Inshop_Clothes/Img"
    content = bytearray(disk.pack(folder / "img", folder / "img.zip").read_bytes())
    for entry in re.finditer(b"PK\x01\x02", bytes(content)):  # Entries of the archive's directory.
        content[entry.start() + 8] |= 1
    (folder / "img.zip").write_bytes(content)
    sentence = error_at("inshop", tmp_path, downloads)
    assert "img.zip is encrypted; unpack it with the password" in sentence


@pytest.fixture
def packed_cub(tmp_path):
    """CUB in an archive that has to be unpacked, and its contents."""
    written = disk.write_cub(tmp_path)
    return disk.pack(tmp_path / "CUB_200_2011", tmp_path / "CUB_200_2011.tar"), written


def test_an_archive_writes_nothing_outside(packed_cub, tmp_path, downloads):
    path, written = packed_cub
    with tarfile.open(path, "a") as packed:
        for name in ("../../escaped.jpg", "CUB_200_2011/images/001.Bird_1/../../../../escaped.jpg"):
            packed.addfile(tarfile.TarInfo(name))
        link = tarfile.TarInfo("CUB_200_2011/images/001.Bird_1/link.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
        packed.addfile(link)
    assert open_at("cub200", tmp_path, downloads) == written
    assert not list(tmp_path.rglob("escaped.jpg"))


@pytest.mark.usefixtures("packed_cub")
def test_a_folder_that_cannot_be_written_or_a_full_disk_is_reported(tmp_path, downloads):
    downloads.write_bytes(b"no folder")
    assert error_at("cub200", tmp_path, downloads).startswith(f"cannot write to {downloads} (")
    with small_disk(tmp_path / "disk", "16k") as small:
        sentence = error_at("cub200", tmp_path, small)
        assert f"to {small} (No space left on device)" in sentence and "--manual_dir" in sentence
        assert not list(small.iterdir())


def test_files_of_killed_processes_are_removed_but_not_of_running_ones(
    packed_cub, tmp_path, downloads
):
    killed, living = (downloads / f".cub200-unfinished-{n}" for n in ("killed", "living"))
    for folder in (killed, living):
        (folder / "images").mkdir(parents=True)
    handle = os.open(living, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    assert open_at("cub200", tmp_path, downloads) == packed_cub[1]
    os.close(handle)
    assert list(downloads.iterdir()) == [living]


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
    layout = OFFICIAL_DATASETS["omniglot"]
    moved = [
        dataclasses.replace(
            archive,
            url=f"{address}/{archive.file}",
            sha256=checksum or hashlib.sha256((folder / archive.file).read_bytes()).hexdigest(),
        )
        for archive in layout.source.archives
        if archive.url
    ]
    source = dataclasses.replace(layout.source, archives=tuple(moved))
    return dataclasses.replace(layout, source=source)


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
    lines = capfd.readouterr().err.splitlines()
    assert lines == [f"downloading {address}/{file} to {downloads}" for file in files]


def test_unpacked_archives_are_not_downloaded(remote, downloads):
    written = disk.write_omniglot(downloads)
    with at_address("http://127.0.0.1:1", remote[0]).open(None, downloads) as found:
        assert contents(found) == written


def refusal(layout, downloads):
    """Returns why a download fails, of which nothing is kept."""
    with pytest.raises(UserError) as caught, layout.open(None, downloads):
        pass
    assert not list(downloads.iterdir())
    sentence = str(caught.value)
    assert sentence.startswith("cannot download images_background.zip (")
    assert "get images_background.zip and images_evaluation.zip from https://github" in sentence
    return re.search(r"\((.*?)\);", sentence)[1]


def test_failed_downloads_are_explained_and_not_kept(remote, downloads, tmp_path):
    folder, _ = remote
    with served(folder) as (address, _):
        reason = refusal(at_address(address, folder, checksum="0" * 64), downloads)
        assert reason == "its SHA-256 differs from that of the official file"
        reason = refusal(at_address(f"{address}/empty", folder), downloads)
        assert re.fullmatch(r"127\.0\.0\.1:\d+ answered 404 File not found", reason)
        with small_disk(tmp_path / "disk", "4k") as small:
            assert refusal(at_address(address, folder), small) == "No space left on device"
    reason = refusal(at_address("http://127.0.0.1:1", folder), downloads)
    assert reason == "no connection to 127.0.0.1:1"


def test_the_real_letters_share_no_alphabet(downloads):
    folder = small_runs.REPOSITORY.parent / "shared/data/omniglot"
    if not folder.exists():
        pytest.skip("the letters of shared/data are not here")
    found = open_at("omniglot", folder, downloads)
    counts = [Count(len(part), len({i.label for i in part})) for part in found.values()]
    assert counts == [Count(2720, 136), Count(2120, 106)]
    train, test = ({image.superlabel for image in part} for part in found.values())
    assert test == {"Japanese_(katakana)", "Sanskrit", "Tagalog"} and not train & test
    assert all(i.content.startswith(b"\x89PNG") for part in found.values() for i in part)
