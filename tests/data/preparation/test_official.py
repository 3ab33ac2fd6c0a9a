"""Official datasets: folders, archives, downloads, and damaged lists."""

from functools import partial

import pooch
import pytest

from hypjax.data.opening import open_prepared
from hypjax.data.preparation.prepare import declared, prepare
from hypjax.errors import UserError
from tests.helpers import official_files as disk

HALVES = {"cars_train": "cars_train.tgz", "devkit": "car_devkit.tgz"}
IMG, OMNIGLOT = "Inshop_Clothes/Img", ("background", "evaluation")
# Dataset and part, writer of its folders, and the official archives that contain these.
OFFICIAL = [
    ("cub200", disk.write_cub, {"CUB_200_2011": "CUB_200_2011.tgz"}),
    ("cars196:train", partial(disk.write_cars_halves, halves=("cars_train",)), HALVES),
    ("cars196", disk.write_cars_halves, HALVES | {"cars_test": "cars_test.tgz"}),
    ("cars196", partial(disk.write_cars_halves, doubled=True), {}),
    ("cars196", disk.write_cars, {"cars196/car_ims": "cars196/car_ims.tgz"}),
    ("sop", disk.write_sop, {"Stanford_Online_Products": "Stanford_Online_Products.zip"}),
    ("inshop", disk.write_inshop, {f"{IMG}/img": f"{IMG}/img.zip"}),
    ("inshop", partial(disk.write_inshop, photos="img_highres"), {}),
    ("omniglot", disk.write_omniglot, {f"images_{x}": f"images_{x}.zip" for x in OMNIGLOT}),
    ("omniglot", partial(disk.write_omniglot, small=True), {}),
    ("grocery", disk.write_grocery, {"GroceryStoreDataset": "GroceryStoreDataset-master.zip"}),
]


def open_at(name, manual_dir, downloads):
    """Returns the listed images, in the form that the writers return."""
    name, _, part = name.partition(":")
    official = declared(name).parts[part] if part else declared(name)

    def written(i):
        assert i.box is None
        content = files.tree.files[i.file].read_bytes()
        return disk.Written(i.name, i.class_name, i.coarse_label, content)

    with official.open(manual_dir, downloads) as files:
        return {split: [*map(written, images)] for split, images in files.images.items()}


@pytest.mark.parametrize(("name", "write", "packed"), OFFICIAL)
def test_the_official_folder_and_archives_list_the_same_images(name, write, packed, tmp_path):
    written, downloads = write(tmp_path), tmp_path / "downloads"
    assert open_at(name, tmp_path, downloads) == written
    for folder, archive in packed.items():
        disk.pack(tmp_path / folder, tmp_path / archive)
    assert open_at(name, tmp_path, downloads) == written
    assert not downloads.exists() or not list(downloads.iterdir())


# Dataset, list, number of a line, what it is replaced by, and part of the message.
@pytest.mark.parametrize(
    ("name", "file", "line", "text", "problem"),
    [
        ("sop", "Ebay_train.txt", 3, "2 1 4 ../x.JPG", "Ebay_train.txt, line 3: .*damaged"),
        ("sop", "Ebay_train.txt", 3, "2 1 4 chair_final/110000000001_0.JPG", "listed twice"),
        ("grocery", "dataset/val.txt", 1, "val/Fruit/Kiwi/a.jpg, 81, 3", "no product 81"),
        ("cars196", "cars_annos.mat", 1, "MATLAB 5.0 MAT-file", "cars_annos.mat: "),
    ],
)
def test_a_damaged_list_is_named(name, file, line, text, problem, tmp_path):
    dict(row[:2] for row in OFFICIAL)[name](tmp_path)
    (path,) = tmp_path.glob(f"*/{file}")
    lines = path.read_text(errors="replace").splitlines()
    lines[line - 1] = text
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(UserError, match=problem):
        open_at(name, tmp_path, tmp_path / "downloads")


def test_what_is_missing_or_cannot_be_downloaded_is_named_with_advice(
    tmp_path, monkeypatch, capsys
):
    def fail(url, known_hash, file, folder, **options):
        folder.mkdir(parents=True)
        assert "--manual_dir" in capsys.readouterr().err  # Before it waits for the network.
        raise ConnectionError('Max retries exceeded (Caused by E("HTTPS(): No network"))')

    monkeypatch.setattr(pooch, "retrieve", fail)
    disk.write_cars_halves(tmp_path / "cars")
    (tmp_path / "cars/cars_test_annos_withlabels.mat").unlink()
    for name, folder, keyword in (
        ("sop", tmp_path / "none", "none does not exist"),
        ("sop", tmp_path, "has no files of sop.*--manual_dir"),
        ("cars196", tmp_path / "cars", "withlabels.*--part=train"),
        ("omniglot", None, r"cannot download http.* \(No network\).*--manual_dir"),
    ):
        with pytest.raises(UserError, match=keyword):
            prepare(name, manual_dir=folder, data_dir=tmp_path / "data")


def test_archives_are_downloaded_with_their_checksums(tmp_path, monkeypatch):
    written, asked = disk.write_omniglot(tmp_path / "remote"), []

    def retrieve(url, known_hash, fname, path, progressbar):
        asked.append((url, known_hash))
        path.mkdir(exist_ok=True)
        disk.pack(tmp_path / "remote" / fname.removesuffix(".zip"), path / fname)

    monkeypatch.setattr(pooch, "retrieve", retrieve)
    assert open_at("omniglot", None, tmp_path / "downloads") == written
    published = [archive for archive in declared("omniglot").archives if archive.url]
    assert asked == [(archive.url, f"sha256:{archive.sha256}") for archive in published]


def test_groceries_have_descriptions(tmp_path):
    disk.write_grocery(tmp_path)
    prepare("grocery", data_dir=str(tmp_path), manual_dir=str(tmp_path), allow_partial=True)
    splits = open_prepared("grocery", str(tmp_path), captioned=True)
    images = splits.test
    coarse = [label.rpartition("/")[2] for label in images.coarse_labels]
    assert images.captions.tolist() == [(f"A {name}, ripe.",) for name in coarse]
    assert open_prepared("grocery", str(tmp_path)).test.captions is None
