"""Files and folders that replace others."""

import pathlib

import pytest

from hypjax.system.files import absolute, checksum, replacing


def test_a_folder_is_replaced_by_a_complete_one(tmp_path):
    folder = tmp_path / "gallery"

    def replace(content):
        with replacing(folder) as temporary:
            temporary.mkdir()
            (temporary / "file").write_text(content)

    replace("0")
    with pytest.raises(KeyboardInterrupt), replacing(folder) as temporary:
        temporary.mkdir()
        raise KeyboardInterrupt
    assert (folder / "file").read_text() == "0"
    replace("1")
    assert (folder / "file").read_text() == "1"
    assert [path.name for path in tmp_path.iterdir()] == ["gallery"]


def test_absolute_paths_have_no_dots_and_follow_links_only_before_them(tmp_path, monkeypatch):
    (tmp_path / "real/deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real/deep")
    monkeypatch.chdir(tmp_path / "real")
    for path, expected in (
        ("deep/a.jpg", "real/deep/a.jpg"),
        ("../link/a.jpg", "link/a.jpg"),
        ("../link/../a.jpg", "real/a.jpg"),  # Not tmp_path / "a.jpg".
        ("./deep/../../link", "link"),
    ):
        assert absolute(pathlib.Path(path)) == tmp_path / expected


def test_checksums_differ_where_crc_32_collides():
    assert checksum(b"plumless") != checksum(b"buckeroo")
