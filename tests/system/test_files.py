"""Files and folders that replace others."""

import pathlib
from concurrent.futures import ThreadPoolExecutor

import pytest

from hypjax.system.files import absolute, checksum, replacing


def test_a_folder_is_there_while_others_replace_it(tmp_path):
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
    with ThreadPoolExecutor(2) as pool:
        writes = [pool.submit(replace, str(i)) for i in range(30)]
        while not all(write.done() for write in writes):
            assert (folder / "file").exists()
        assert [write.result() for write in writes] == [None] * 30
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
