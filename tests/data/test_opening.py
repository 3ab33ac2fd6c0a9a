"""Prepared datasets as runs see them, from small copies of the official files."""

import io

import numpy as np
import pytest
from PIL import Image

from hypjax.assemble import assemble_training, open_splits
from hypjax.config import load_config
from hypjax.data.plans import DrawnClassPlans
from hypjax.data.preparation.prepare import prepare
from hypjax.errors import UserError
from tests.helpers import official_files as disk
from tests.helpers import small_runs

SMALL = [field for field in small_runs.SMALL if not field.startswith("data.")]
BIRDS = (1, 2, 3, 101, 102, 103)
WRITERS = {
    "cub": ("cub200", lambda root: disk.write_cub(root, BIRDS)),
    "inshop": ("inshop", disk.write_inshop),
    "omniglot": ("omniglot", lambda root: disk.write_omniglot(root, small=True)),
}


def load(repository, folder, name, *overrides):
    fields = [
        *SMALL,
        *("model.architecture=vit", "model.weights=None", "optim.frozen=()", "eval.every=0"),
        *("data.image_size=16", "data.resize=18", "data.validation_classes=0", "eval.ks=1,2"),
        *("train.total_steps=2", "train.batch_size=4", "run.workers=0", "optim.warmup_steps=0"),
        *(f"run.data_dir={folder / 'data'}", *overrides),
    ]
    return load_config(f"{repository}/configs/{name}.py", fields)


def prepared(tmp_path, config_name, write=None):
    """Prepares a small copy, and returns the written files."""
    name, writer = WRITERS[config_name]
    written = (write or writer)(tmp_path / "files")
    where = dict(data_dir=str(tmp_path / "data"), manual_dir=str(tmp_path / "files"))
    prepare(name, **where, allow_partial=True)
    return written


@pytest.mark.parametrize("name", WRITERS)
def test_a_prepared_dataset_is_opened(tmp_path, repository, name):
    written = prepared(tmp_path, name)
    splits = open_splits(load(repository, tmp_path, name))
    parts = {"train": splits.train, "gallery": splits.gallery}
    parts["query" if splits.gallery else "test"] = splits.test
    for split, files in written.items():
        part = parts[split]
        names, labels, coarse_labels, contents = zip(*files, strict=True)
        assert tuple(part.names) == names and tuple(part.class_names) == labels
        assert tuple(part.content(i) for i in range(len(part))) == contents
        sizes = [Image.open(io.BytesIO(content)).size[::-1] for content in contents]
        np.testing.assert_array_equal(part.sizes, sizes)
        assert len({*zip(part.labels, labels, strict=True)}) == part.num_classes == len({*labels})
        if any(coarse_labels):
            assert tuple(part.coarse_labels) == coarse_labels
            numbers = np.array(part.coarse_labels_of_classes()[0])[part.renumbered().labels]
            expected = np.unique(coarse_labels, return_inverse=True)[1]
            np.testing.assert_array_equal(numbers, expected)
        else:
            assert part.coarse_labels is None and part.coarse_labels_of_classes() == ()
    (note,) = splits.notes
    images = len(written["train"])
    assert note.startswith(f"a partial copy of {WRITERS[name][0]}: train {images} of ")


def test_a_copy_without_test_images_is_tested_on_held_out_classes(tmp_path, repository):
    prepared(tmp_path, "cub", lambda root: disk.write_cub(root, (1, 2, 3, 7)))
    with pytest.raises(UserError, match="cub200 has .* no test images; .*test_classes"):
        open_splits(load(repository, tmp_path, "cub"))
    splits = open_splits(load(repository, tmp_path, "cub", "data.test_classes=2"))
    assert len(splits.train) == len(splits.test) == 6
    assert {*splits.train.names}.isdisjoint(splits.test.names)
    assert splits.train.num_classes == splits.test.num_classes == 2
    assert splits.notes[1] == "tested on 2 of the training classes, held out"


def test_a_copy_with_other_pixels_is_another_dataset(tmp_path, repository):
    """Labels and sizes are equal, but one image has other pixels."""
    name, cub = "images/001.Bird_1/Bird_1_0000.jpg", tmp_path / "cub"
    prepared(cub, "cub")
    other = {name: disk.picture(name, "other")}
    prepared(tmp_path, "cub", lambda root: disk.write_cub(root, BIRDS, broken=other))
    a, b = (open_splits(load(repository, folder, "cub")) for folder in (cub, tmp_path))
    np.testing.assert_array_equal(a.train.sizes, b.train.sizes)
    assert a.fingerprint != b.fingerprint
    fields = ["data.decoder=fast", "train.sampling=drawn_classes", "train.repeat_images=True"]
    config = load(repository, cub, "cub", *fields, "seed=5")
    again = open_splits(config)
    assert any("fast" in note for note in again.notes) and again.train.fast and again.test.fast
    assert again.fingerprint == a.fingerprint
    plans = assemble_training(config).plans
    assert type(plans) is DrawnClassPlans and plans.repeats
    assert (plans.batch_size, plans.samples_per_class) == (4, 2)


def test_unusable_copies_are_rejected(tmp_path, repository):
    refused = {(101, 102): "neither training images", (1, 2, 101): "test part .* has 1 class"}
    for i, (classes, message) in enumerate(refused.items()):
        prepared(tmp_path / str(i), "cub", lambda root, x=classes: disk.write_cub(root, x))
        with pytest.raises(UserError, match=message):
            open_splits(load(repository, tmp_path / str(i), "cub"))
