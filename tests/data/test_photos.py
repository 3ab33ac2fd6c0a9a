"""Users' own images: folders and tables, all kinds of pictures, splits by class."""

import io
import os
import pathlib
import shutil
import struct
import urllib.error
import urllib.request
import zipfile

import numpy as np
import pytest
from PIL import Image

from hypjax.assemble import _check_depth, open_splits
from hypjax.config import default_config
from hypjax.data import opening, pipeline, pixels
from hypjax.data.fetching import local_path
from hypjax.data.photos import find_images, given_images, list_folder
from hypjax.data.pipeline import readable_batches
from hypjax.errors import UserError
from hypjax.runs.tables import noted
from hypjax.types import View
from tests.helpers.pictures import encoded, write_picture, write_pictures, write_table


def names_of(dataset, root):
    return {os.path.relpath(dataset.name(i), root) for i in range(len(dataset))}


def open_at(path, **data):
    config = default_config()
    config.data.name, config.data.path = "folder", str(path)
    config.data.update(data)
    return open_splits(config)


def test_train_and_test_folders_are_splits(tmp_path, capsys):
    names = [f"{folder}/{i}.png" for folder in ("train/a", "train/b", "test/c") for i in "12"]
    write_pictures(tmp_path, [*names, "test/a/1.png"])
    splits = open_at(tmp_path, validation_classes=0, test_classes=0.5)
    assert names_of(splits.train, tmp_path) == {*names[:4]} and len(splits.test) == 3
    assert splits.validation is None and splits.gallery is None
    note = "1 class in more than one split, such as a (train, test)"
    assert note in capsys.readouterr().err
    with pytest.raises(UserError, match="has splits already"):
        open_at(tmp_path, split="images")
    everything = open_at(tmp_path, split="none", validation_classes=0.2)
    assert names_of(everything.train, tmp_path) == {*names, "test/a/1.png"}
    assert everything.validation is None and not len(everything.test) and not everything.tasks
    assert everything.images().splits.tolist() == 7 * ["train"]
    shutil.rmtree(tmp_path / "test")
    with pytest.raises(UserError, match="has 1 split .train.; .* or set --config.data.split=none"):
        open_at(tmp_path)
    assert len(open_at(tmp_path, split="none").train) == 4


@pytest.mark.parametrize(
    ("path", "problem"),
    [("class1", "no image of .* has a class"), ("class1/0.png", "0.png is a single")],
)
def test_images_without_classes_train_nothing(photos_folder, path, problem):
    with pytest.raises(UserError, match=f"{problem}.*; name a folder with a sub-folder"):
        open_at(photos_folder / path)


def test_classes_are_split_by_a_share_and_a_seed(photos_folder):
    def parts(**data):
        splits = open_at(photos_folder, **data)
        return [names_of(part, photos_folder) for part in splits[:3]]

    held_out = parts(test_classes=0.2, validation_classes=0.3)
    classes = [{name.split("/")[0] for name in part} for part in held_out]
    assert [len(part) for part in classes] == [6, 2, 2]
    assert len(set.union(*classes)) == 10
    assert parts(test_classes=2, validation_classes=2) == held_out
    assert parts(test_classes=2, validation_classes=2, split_seed=1)[2] != held_out[2]


@pytest.mark.parametrize(
    ("sizes", "validation", "counts", "message"),
    [  # Images of each class in training, validation and test, or a part of the error.
        ((1, 2, 3, 4, 12), 0, [[1, 2, 3, 2, 9], [], [0, 0, 0, 2, 3]], "fewer than 4 images: 3, on"),
        ((12, 20, 40, 5), 0, [[9, 15, 30, 3], [], [3, 5, 10, 2]], ""),
        ((12, 20, 40, 5), 0.1, [[7, 13, 27, 3], [2, 2, 3], [3, 5, 10, 2]], ""),
        ((8, 8, 8), 0.1, [[6, 6, 6], [], [2, 2, 2]], "no image is held out for validation"),
        ((9, 2), 0, None, "1 class with 4 or more images, .* needs two; add"),
    ],
)
def test_few_classes_are_split_by_images(tmp_path, capsys, sizes, validation, counts, message):
    names = [f"{name}/{i}.png" for name, n in zip("abcde", sizes, strict=False) for i in range(n)]
    root = write_pictures(tmp_path, names)
    options = {"split": "images", "validation_classes": validation}
    if counts is None:
        with pytest.raises(UserError, match=message):
            open_at(root, **options)
        return
    splits = open_at(root, **options)
    parts = [set() if part is None else names_of(part, root) for part in splits[:3]]
    assert sum(map(len, parts)) == len(set().union(*parts)) == sum(sizes)
    labels = [() if part is None else part.labels for part in splits[:3]]
    assert [np.bincount(x).tolist() for x in labels] == counts and splits.gallery is None
    assert message in capsys.readouterr().err
    assert "tested on other images of the classes that were trained on" in splits.notes[0]
    again, other = (open_at(root, **options, split_seed=seed).test for seed in (0, 1))
    assert names_of(again, root) == parts[2] != names_of(other, root)


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_table_gives_labels_splits_and_groups(tmp_path, photos_folder, suffix):
    """Of ten classes with six images each, in two groups."""
    names = ["train"] * 24 + ["validation"] * 12 + ["query", "gallery", "gallery"] * 8
    rows = [
        {"path": str(path), "label": 10 + i // 6, "split": names[i], "coarse_label": f"g{i // 30}"}
        for i, path in enumerate(sorted(photos_folder.rglob("*.png")))
    ]
    splits = open_at(write_table(tmp_path / f"table{suffix}", rows), validation_classes=0)
    for name, part in zip(("train", "validation", "query", "gallery"), splits[:4], strict=True):
        assert {*part.names} == {row["path"] for row in rows if row["split"] == name}
    assert set(splits.train.labels) == {0, 1, 2, 3}
    assert set(splits.test.labels) == set(splits.gallery.labels) == {6, 7, 8, 9}
    assert {*splits.gallery.coarse_labels} == {"g1"}


def test_checked_images_are_not_decoded_again_until_one_changes(
    photos_folder, tmp_path, monkeypatch
):
    folder = shutil.copytree(photos_folder, tmp_path / "photos")
    first = open_at(folder, test_classes=3)
    with monkeypatch.context() as patch:
        patch.setattr(opening, "_measure_file", None)
        again = open_at(folder, test_classes=3)
    assert again.fingerprint == first.fingerprint
    np.testing.assert_array_equal(again.train.sizes, first.train.sizes)
    write_picture(folder / "class0/added.png")
    assert open_at(folder, test_classes=3).fingerprint != first.fingerprint


def gradient():
    y, x = np.mgrid[0:8, 0:12]
    return np.stack([20 * x, 30 * y, 10 * (x + y)], axis=-1).astype(np.uint8)


def test_a_damaged_cache_of_sizes_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_pictures(tmp_path / "photos", [f"{label}/{i}.png" for label in "abcd" for i in (1, 2)])
    fingerprints = set()
    for byte in (0, 150, 250):
        where, held_out = str(tmp_path / "photos"), opening.HeldOutClasses(2, 0, 0)
        opened = opening.open_photos(where, opening.Decoding(), held_out)
        fingerprints.add(opened.fingerprint)
        (cache,) = tmp_path.glob("cache/hypjax/measured/*")
        content = bytearray(cache.read_bytes())
        content[byte] ^= 1
        cache.write_bytes(content)
    assert len(fingerprints) == 1


def test_subfolders_are_classes_and_other_files_are_ignored(tmp_path):
    """One named train is a split only if it has sub-folders itself."""
    names = ["a/1.jpg", "a/deep/2.PNG", "b/3.webp", "train/1.png"]
    write_pictures(tmp_path, [*names, ".hidden/5.jpg"])
    for stray in ("a/._1.jpg", "a/notes.txt", "6.txt"):
        (tmp_path / stray).write_bytes(b"not an image")
    images = list_folder(tmp_path)
    assert [os.path.relpath(name, tmp_path) for name in images.names] == names
    assert images.class_names.tolist() == ["a", "a", "b", "train"]
    write_pictures(tmp_path, ["train/steam/1.png"])
    with pytest.raises(UserError, match="a beside folders of splits"):  # Or its class is lost.
        find_images(str(tmp_path))


def test_files_that_may_be_images_are_read_or_counted(tmp_path, capsys):
    names = ["a/1.png", "a/2.avif", "b/3.jp2", "b/4.JFIF", "c/5.tga"]
    write_pictures(tmp_path, names)
    for name in ("a/1.heic", "b/2.HEIC", "b/IMG_1", "c/6.cr2", "c/7.svg", "c/7.txt", "7.json"):
        (tmp_path / name).write_bytes(b"?")
    assert names_of(list_folder(tmp_path), tmp_path) == {*names}
    (line,) = capsys.readouterr().err.splitlines()
    assert "5 of 12 files" in line and "[heif]" in line
    (tmp_path / "b/2.HEIC").write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic")
    if ".heic" not in Image.registered_extensions():
        with pytest.raises(UserError, match=r"2.HEIC \(HEIC needs pip install .*\[heif\]"):
            opening.measured(find_images(str(tmp_path / "b/2.HEIC")))
    assert "2 .heic, 1 without a suffix, 1 .cr2, 1 .svg" in line


def test_links_are_images_of_their_own_and_lead_to_no_folder_on_their_way(tmp_path, capsys):
    root = write_pictures(tmp_path / "root", ["a/1.png", "b/2.png", "c/3.png"])
    (root / "b/1.png").symlink_to(root / "a/1.png")
    (root / "d").symlink_to(root / "c")
    listed = {"a/1.png", "b/1.png", "b/2.png", "c/3.png", "d/3.png"}
    assert names_of(find_images(str(root)), root) == listed
    assert not capsys.readouterr().err
    targets = {"a/x": root, "a/y": tmp_path, "b/z": root / "c", "c/z": root / "b"}
    for name, target in targets.items():
        (root / name).symlink_to(target)
    listed |= {"b/z/3.png", "c/z/1.png", "c/z/2.png", "d/z/1.png", "d/z/2.png"}
    assert names_of(find_images(str(root)), root) == listed
    assert "a/x is a link to" in capsys.readouterr().err
    assert names_of(find_images(str(root / "**/*.png")), root) == listed
    (tmp_path / "a.xlsx").touch()
    places = {
        "photos": "photos does not exist",
        "*.jpg": "no images at",
        "a.xlsx": "save it as .csv",
    }
    for where, message in places.items():
        with pytest.raises(UserError, match=message):
            find_images(str(tmp_path / where))


def test_photos_are_rotated_upright():
    exif, stored = Image.Exif(), np.ascontiguousarray(np.rot90(gradient()))
    exif[0x0112] = 6  # To be turned clockwise.
    content = encoded(Image.fromarray(stored), exif=exif)
    np.testing.assert_array_equal(pixels.decode(content, 3, upright=True), gradient())
    np.testing.assert_array_equal(pixels.decode(content, 3), stored)  # As in prepared data.


def test_any_colour_mode_is_read():
    """Only the first frame of several is."""
    rgb = Image.fromarray(gradient())
    grey, transparent = rgb.convert("L"), rgb.copy()
    transparent.putalpha(0)
    white, as_grey = np.full((8, 12, 3), 255, np.uint8), np.asarray(grey.convert("RGB"))
    wide = Image.fromarray(np.asarray(grey).astype(np.uint16) * 256 + 7)
    for content, wanted, tolerance in [
        (encoded(rgb, "WEBP", lossless=True), gradient(), 0),
        (encoded(rgb, "JPEG", quality=100, subsampling=0), gradient(), 6),
        (encoded(rgb.convert("CMYK"), "TIFF"), gradient(), 0),
        (encoded(grey, "GIF", save_all=True, append_images=[rgb] * 2), as_grey, 1),
        (encoded(grey), as_grey, 0),
        (encoded(wide), as_grey, 0),
        (encoded(grey.convert("1")), np.asarray(grey.convert("1").convert("RGB")), 0),
        (encoded(transparent), white, 0),
        (encoded(rgb.quantize(16), transparency=bytes(16)), white, 0),
    ]:
        for given in (content, Image.open(io.BytesIO(content))):
            image = pixels.decode(given, 3, upright=True)
            assert image.mode == "RGB" and pixels.decode(given, 1).mode == "L"
            assert np.abs(np.asarray(image, int) - wanted).max() <= tolerance
    premultiplied, bits = transparent.convert("LA").convert("La"), np.asarray(grey) > 99
    for given, wanted in (
        (premultiplied, white),
        (gradient(), gradient()),
        (np.asarray(transparent), white),
        (np.asarray(wide), as_grey),
        (bits, np.repeat(bits[..., None] * 255, 3, axis=2)),
    ):
        np.testing.assert_array_equal(pixels.decode(given, 3), wanted)
    for kind in (np.int32, np.float32, np.uint32):  # Without a common scale.
        with pytest.raises(UserError, match="uint8, uint16 or bool"):
            pixels.decode(gradient().astype(kind), 3)
    with pytest.raises(UserError, match=r"shape \[0, 5, 3\]"):
        pixels.decode(np.zeros((0, 5, 3), np.uint8), 3)


RAMP = np.tile(np.linspace(0, 255, 12).astype(int), (8, 1))  # From black to white.


def tiff(bits, values, photometric=1, order="<", **tags):
    """Returns a TIFF, uncompressed, of 12 bits packed, or 16 in either order of bytes."""
    values = np.asarray(values)
    if bits == 12:
        a, b = values.reshape(-1, 2).T
        data = np.stack([a >> 4, (a & 15) << 4 | b >> 8, b & 255], 1).astype(np.uint8).tobytes()
    else:
        data = values.astype(f"{order}u{-(-bits // 8)}").tobytes()
    entries = {256: [12], 257: [8], 258: [bits], 259: [1], 262: [photometric], 277: [1]}
    entries |= {278: [8], 279: [len(data)]} | {int(tag[1:]): x for tag, x in tags.items()}
    start, extra, body = 8 + 2 + 12 * (len(entries) + 1) + 4, b"", b""
    entries[273] = [start + sum(2 * len(x) for x in entries.values() if len(x) > 2)]
    for tag, numbers in sorted(entries.items()):
        content = struct.pack(f"{order}{len(numbers)}H", *numbers)
        if len(content) > 4:
            offset, extra = start + len(extra), extra + content
            content = struct.pack(f"{order}I", offset)
        body += struct.pack(f"{order}HHI", tag, 3, len(numbers)) + content.ljust(4, b"\0")
    magic = struct.pack(f"{order}2sHIH", {"<": b"II", ">": b"MM"}[order], 42, 8, len(entries))
    return magic + body + bytes(4) + extra + data


def pgm(maximum, values):
    return b"P5 12 8 %d\n" % maximum + np.asarray(values).astype(">u2").tobytes()


def ramp_of(maximum):
    return RAMP * maximum // 255


GREYS = {
    "12": tiff(12, ramp_of(4095)),
    "16": tiff(16, ramp_of(65535)),
    "16, big-endian": tiff(16, ramp_of(65535), order=">"),
    "16, white is 0": tiff(16, 65535 - ramp_of(65535), photometric=0),
    "12 of 16, declared": tiff(16, ramp_of(4095), t281=[4095]),
    "10 of 16, declared": tiff(16, ramp_of(1023), order=">", t281=[1023]),
    "16, largest value": tiff(16, ramp_of(65535), t281=[65000]),
    "8, white is 0": tiff(8, 255 - RAMP, photometric=0),
    "palette of 8 bits": tiff(8, RAMP, 3, t320=[*range(256)] * 3),
    "palette of 16 bits": tiff(8, RAMP, 3, t320=[257 * i for i in range(256)] * 3),
    "PGM of 16": pgm(65535, ramp_of(65535)),
    "PGM of 12": pgm(4095, ramp_of(4095)),
    "PNG of 16": encoded(Image.fromarray(ramp_of(65535).astype(np.uint16))),
    "PNG of 16, transparent": encoded(
        Image.fromarray(np.where(RAMP == 255, 77, ramp_of(65535)).astype(np.uint16)),
        transparency=77,
    ),
}


@pytest.mark.parametrize("name", GREYS)
def test_greys_of_any_number_of_bits_are_scaled_to_8(name):
    for content in (GREYS[name], Image.open(io.BytesIO(GREYS[name]))):
        image = np.asarray(pixels.decode(content, 3, upright=True), int)
        assert image.shape == (8, 12, 3) and np.abs(image - RAMP[..., None]).max() <= 1


def test_pixels_without_a_white_are_refused():
    signed, kind = tiff(16, RAMP, t339=[2]), "a TIFF of a kind that Pillow cannot read; save it as"
    floats = encoded(Image.fromarray(RAMP.astype(np.float32)), "TIFF")
    for content, message in [
        (signed, "are signed, floating-point"),
        (floats, "save it with 8 or 16 bits"),
        (encoded(Image.fromarray(RAMP.astype(np.int32)), "TIFF"), "save it with 8 or 16 bits"),
        (tiff(12, RAMP, photometric=0), kind),
        (tiff(14, RAMP), kind),
    ]:
        with pytest.raises(ValueError, match=message):
            pixels.decode(content, 3)


def test_images_that_use_few_of_their_bits_are_named_once(tmp_path, capsys):
    dark, bright = ramp_of(4095).astype(np.uint16), ramp_of(65535).astype(np.uint16)
    Image.fromarray(dark).save(tmp_path / "a.tif")
    pipeline._warn_once.cache_clear()
    mixed = [tmp_path / "a.tif", np.zeros((8, 8), np.uint8), dark]
    for images, workers, warnings in (
        (mixed, 1, 1),
        (mixed, 0, 0),  # Already said.
        ([dark], 0, 1),
        ([dark, dark, bright], 0, 1),
        ([np.zeros((8, 8), np.uint8)], 0, 0),
    ):
        for _ in readable_batches(given_images(images), View(8, 8, 3), 2, workers):
            pass
        printed = capsys.readouterr().err
        assert printed.count("stay below a sixteenth of white and are nearly") == warnings
        assert warnings == 0 or f"such as {given_images(images).name(0)}, stay" in printed


def test_images_that_occur_more_than_once_are_counted(tmp_path):
    """Of eight classes with two images, each of its own colour."""
    for i, name in enumerate(f"{c}/{j}.png" for c in "abcdefgh" for j in "01"):
        split = "train" if name < "e" else "gallery" if "1." in name else "query"
        write_picture(tmp_path / split / name, colour=(i, 0, 0))
    first = open_at(tmp_path, validation_classes=0)
    assert first.repeats == () and not any(first.own_rows)
    shutil.copy(tmp_path / "train/a/0.png", tmp_path / "train/b/copy.png")
    shutil.copy(tmp_path / "train/a/1.png", tmp_path / "gallery/e/copy.png")
    shutil.copy(tmp_path / "query/f/0.png", tmp_path / "gallery/f/copy.png")
    for link in ("gallery/g/link.png", "gallery/h/link.png"):
        (tmp_path / link).symlink_to(tmp_path / "query/g/0.png")
    splits = open_at(tmp_path, validation_classes=0)
    assert splits.own_rows == [[], [], [5, 7], []]
    expected = [
        "queries that are in the gallery, and do not find themselves: 1 of 4",
        f"images in more than one class: 3, such as {tmp_path}/train/a/0.png (a) and "
        f"{tmp_path}/train/b/copy.png (b)",
        "gallery images that are identical to training images: 1 of 8",
        "query images that are identical to gallery images: 1 of 4",
    ]
    assert [note[: len(x)] for note, x in zip(splits.repeats, expected, strict=True)] == expected
    assert noted(splits.notes, splits.repeats) == {"repeats": [*splits.repeats]}


def test_links_and_identical_images_of_the_test_are_counted(tmp_path):
    for i, name in enumerate(f"{c}/{j}.png" for c in "abcdefgh" for j in "012"):
        write_picture(tmp_path / ("train" if name < "e" else "test") / name, colour=(i, 0, 0))
    (tmp_path / "test/e/link.png").symlink_to(tmp_path / "test/e/0.png")
    shutil.copy(tmp_path / "test/f/0.png", tmp_path / "test/f/copy.png")
    splits = open_at(tmp_path, validation_classes=0)
    assert splits.own_rows[:4] == [[0, 3], [1], [2], [0, 3]] and splits.task.num_items == 12
    links, identical = splits.repeats
    assert links == "images that share their files, and do not find each other: 2 of 14"
    assert "test images that are identical to other test images: 2 of 14" in identical
    assert "f/0.png and" in identical and "f/copy.png" in identical
    config = default_config()
    config.eval.expansion = 13
    validated = splits._replace(own_rows=(), validation=splits.test)
    with pytest.raises(UserError, match="eval.expansion is 13, .* only 12 images to find"):
        _check_depth(config, validated)


def packed(folder, kind, files):
    """Writes pictures and other files, which are empty, to an archive; returns its path."""
    write_pictures(folder, [file for file in files.split() if file.endswith(".png")])
    for file in files.split():
        (folder / file).touch()
    return shutil.make_archive(folder, kind, folder)


@pytest.mark.parametrize(
    ("kind", "files", "classes", "splits"),
    [  # Of the images, in alphabetical order.
        ("zip", "train/a/1.png train/b/2.png", "ab", ["train"] * 2),
        ("zip", "photos/cars/a/1.png photos/cars/b/2.png", ["cars"] * 2, None),
        ("gztar", "1.png photos/a/2.png", ["", "photos"], None),
        ("tar", "photos/a/1.png photos/b/2.png photos/LICENSE", "ab", None),
    ],
)
def test_an_archive_has_the_classes_and_splits_of_its_folder(
    tmp_path, monkeypatch, capsys, kind, files, classes, splits
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    archive = packed(tmp_path / "files", kind, files)
    images, again = find_images(archive), find_images(archive)
    assert images.class_names.tolist() == [*classes]
    assert (None if images.splits is None else images.splits.tolist()) == splits
    assert images.names.tolist() == again.names.tolist()
    assert capsys.readouterr().err.count("unpacking") == 1
    pathlib.Path(archive).write_bytes(b"no archive")
    with pytest.raises(UserError, match="cannot unpack .*files.*unpack it yourself"):
        find_images(archive)


def test_tar_files_of_samples_are_no_folders(tmp_path):
    for kind, files in (("tar", "a/1.png a/1.cls"), ("gztar", "x/a.b/1.png x/a.b/1.seg.json")):
        archive = packed(tmp_path / files.replace("/", "-"), kind, files)
        assert str(local_path(archive)) == archive


@pytest.mark.parametrize(
    ("files", "message"),
    [  # Files of a .tar; whether all are images, all are read if it is the only one.
        ("a.png b.png c.png d.png e.png f.png g.1.png h.20.png", "2 of 8 .* such as g.1.png: "),
        ("gull.png gull.1.png", "1 of 2 images .* would be lost, .* gull.1.png: the first dot"),
        ("i.01.png i.01.cls i.02.png i.02.cls", "1 of 2 .* i.02.png: the first dot .* ends"),
        ("a.png a.cls b.jpg b.cls", "1 of 4 .* b.jpg: .* suffixes of the first .cls, png.*convert"),
        ("a.png b.png c.png d.png e.png f.png f.cls", "f.cls: .* suffixes of the first .png."),
    ],
)
def test_tar_files_whose_images_would_be_lost(tmp_path, monkeypatch, files, message):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    archive = packed(tmp_path / "photos", "tar", files)
    pathlib.Path(archive).rename(tmp_path / "photos-0.tar")
    for where in ("photos-0.tar", "photos-*.tar"):
        if where == "photos-0.tar" and {x[-4:] for x in files.split()} == {".png"}:
            assert len(find_images(str(tmp_path / where))) == len(files.split())
            continue
        with pytest.raises(UserError, match=message):
            find_images(str(tmp_path / where))


def test_an_image_at_an_address_of_the_web_is_fetched(monkeypatch):
    url, content = "https://host/a/1.png?size=2", encoded(Image.fromarray(gradient()))

    def urlopen(request, timeout):
        if request.full_url != url:
            raise urllib.error.URLError(OSError(111, "refused"))
        return io.BytesIO(content)

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    images = find_images(url)
    assert images.path(0) == url and np.array_equal(images.image(0, 3), gradient())
    with pytest.raises(UserError, match=r"cannot fetch https://host/b.png \(refused\)"):
        find_images("https://host/b.png")


OF_SYSTEMS = "@eaDir/1.png/S.png #recycle/x.png a/@Recycle/x.png a/.@__thumb/1.png a/._1.png "
OF_SYSTEMS += "__MACOSX/a/._1.png $RECYCLE.BIN/x.png lost+found/x.png a/Thumbs.db"


@pytest.mark.parametrize("pattern", ["", "/**", "/*/*", ".zip"])
def test_what_systems_keep_beside_photographs_is_left_out_and_counted(
    tmp_path, monkeypatch, capsys, pattern
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    names = ["a/1.png", "a/2.png", "b/3.png", "b/4_small.png"]
    packed(tmp_path / "nas", "zip", f"{' '.join(names)} {OF_SYSTEMS}")
    images = find_images(f"{tmp_path}/nas{pattern}")
    assert [*map(os.path.basename, images.names)] == ["1.png", "2.png", "3.png", "4_small.png"]
    assert " left out of " in (said := capsys.readouterr().err) and "1 #recycle" in said
    if not pattern:
        assert all(f"1 {name}" in said for name in ("@eaDir", ".@__thumb", "._", "Thumbs.db"))
    chosen = find_images(f"{tmp_path}/nas{pattern}", ["*_small.png", "a/2.*", "no"])
    assert [*map(os.path.basename, chosen.names)] == ["1.png", "3.png"]
    said = capsys.readouterr().err
    assert "1 *_small.png" in said and "1 a/2.*" in said and "matches the pattern no" in said
    deleted = find_images(f"{tmp_path}/nas/#recycle{pattern.removesuffix('.zip')[:3]}")
    assert len(deleted) == 1  # Its name was given.


def test_what_is_excluded_changes_the_run_and_needs_a_folder(photos_folder, tmp_path):
    options = {"test_classes": 3, "validation_classes": 0}
    first, other = (open_at(photos_folder, **options, exclude=x) for x in ((), ("class0",)))
    assert (first.train.num_classes, other.train.num_classes) == (7, 6)
    assert first.fingerprint != other.fingerprint
    table = write_table(tmp_path / "t.csv", [{"path": "a", "label": "b"}])
    for where, pattern, message in ((table, "a", "t.csv is no folder"), (tmp_path, "", "empty")):
        with pytest.raises(UserError, match=message):
            find_images(str(where), [pattern])


def test_folders_that_cannot_be_read_are_named_and_left_out(tmp_path, monkeypatch, capsys):
    root = write_pictures(tmp_path, [f"{c}/{i}.png" for c in "abcdef" for i in "12"])
    scandir = os.scandir

    def refuse(folder):
        if os.path.basename(folder) == "c":
            raise PermissionError(13, "Permission denied", folder)
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    for pattern in ("", "/**", "/*/*.png"):
        assert len(find_images(f"{root}{pattern}")) == 10
        assert f"cannot read 1 folder: {root}/c (Permission denied)" in capsys.readouterr().err
    options = {"test_classes": 2, "validation_classes": 0}
    assert open_at(root, **options, skip_corrupt=True).train.num_classes == 3
    for where, message in (
        (root, "denied.*skip_corrupt"),
        (root / "c", "c .Permission denied.; get access"),
    ):
        with pytest.raises(UserError, match=message):
            open_at(where, **options)


def test_brackets_in_the_names_of_folders_are_no_patterns(tmp_path, monkeypatch):
    names = ["Trip [2021]/a/1.png", "Trip [2021]/b/2.png", "x/Trip [2021]/[c]/3.png"]
    monkeypatch.chdir(write_pictures(tmp_path, [*names, "Trip 2/4.png"]))
    for pattern, numbers in {
        "Trip [2021]/*/*.png": "12",
        "Trip [2021]/**": "12",
        f"{tmp_path}/Trip [2021]/a/?.png": "1",
        "**/Trip [2021]/[c]/*": "3",
        "Trip [0-9]/*": "4",
        "Trip*/**/*.png": "124",
    }.items():
        found = find_images(pattern)
        assert sorted(os.path.basename(name)[0] for name in found.names) == [*numbers], pattern
    assert len(find_images(".", ["Trip [2021]/a/?.png", "[[]c]"])) == 2


def zip_of(path, names, encoding):
    """Writes a .zip file of pictures, whose names are bytes of an encoding without a mark."""

    class Unmarked(zipfile.ZipInfo):
        def _encodeFilenameFlags(self):  # noqa: N802
            return self.filename.encode(encoding), 0

    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(Unmarked(name), encoded(Image.new("RGB", (4, 4))))
    return str(path)


@pytest.mark.parametrize(
    ("names", "encoding", "option", "classes"),
    [
        (["photos/a\\1.png", "photos/b/2.png"], "ascii", "", "ab"),
        (["Fotos/Café/1.png", "Fotos/Müsli/2.png"], "utf-8", "", ["Café", "Müsli"]),
        (["写真\\表\\1.png", "写真\\能\\2.png"], "cp932", "?encoding=cp932", "能表"),
        (["é/1.png", "b/2.png"], "cp437", "", "bé"),
        (["é/1.png", "b/2.png"], "cp437", "?encoding=cp999", "names are .* encoding cp999"),
        (["é/1.png", "b/2.png"], "cp437", "?encoding=ascii", "names are .* encoding ascii"),
        (["a\\1.png", "a/1.png"], "ascii", "", "names are not distinct: .*1.png and a/1.png"),
        (["..\\..\\a\\1.png", "/\\c\\..\\..\\b\\2.png"], "ascii", "", "ac"),
    ],
)
def test_names_in_zip_files_of_windows(
    tmp_path, monkeypatch, capsys, names, encoding, option, classes
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    archive = zip_of(tmp_path / "p.zip", names, encoding) + option
    if "names are" in classes:
        with pytest.raises(UserError, match=classes):
            find_images(archive)
        return
    images = find_images(archive)
    assert sorted(images.class_names) == [*classes]
    assert all(name.startswith(str(tmp_path / "cache")) for name in images.names)
    assert not (tmp_path / "a").exists() and not (tmp_path / "cache/hypjax/a").exists()
    assert ("read as cp437" in capsys.readouterr().err) == (encoding == "cp437")


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_only_regular_files_are_read(kind, tmp_path):
    """A pipe would block, and a device may never end."""
    path = tmp_path / "a.png"
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    (tmp_path / "list.txt").write_text("a.png\n")
    with pytest.raises(OSError, match="not a regular file"):
        pixels.read_image(str(path), 3)
    with pytest.raises(UserError, match="a.png .not a regular file"):
        find_images(str(tmp_path / "list.txt")).image(0, 3)
