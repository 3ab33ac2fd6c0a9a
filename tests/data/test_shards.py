"""What is a dataset in files of many images, and what is a folder of images or a table."""

import pytest

from hypjax.data.photos import find_images, list_folder
from hypjax.data.shards import find_dataset
from hypjax.errors import UserError
from tests.helpers.pictures import write_pictures, write_table


def test_folders_of_images_and_tables_stay_what_they_are(photos_folder, tmp_path):
    write_pictures(tmp_path, ["photos/a/1.png", "photos?label=x/b/1.png"])
    (tmp_path / "photos/all.tar").touch()
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked/class0").symlink_to(photos_folder / "class0")
    (tmp_path / "linked/meta.parquet").touch()
    for name in ("photos", "photos?label=x", "linked"):
        assert find_dataset(str(tmp_path / name)) is None
    listed = list_folder(photos_folder)
    columns = zip(listed.names, listed.class_names, strict=True)
    rows = [{"path": path, "label": label} for path, label in columns]
    table = write_table(tmp_path / "a.parquet", [row | {"image": b"thumbnail"} for row in rows])
    assert find_dataset(str(table)) is None and len(find_images(str(table))) == 60
    with pytest.raises(UserError, match="is no dataset of Parquet, Arrow or tar files"):
        find_dataset(f"{tmp_path}/photos?label=a")
