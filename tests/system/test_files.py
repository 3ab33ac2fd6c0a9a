"""Files and folders that replace others."""

from concurrent.futures import ThreadPoolExecutor

from hypjax.system.files import replacing


def test_a_folder_is_there_while_others_replace_it(tmp_path):
    folder = tmp_path / "gallery"

    def replace(content):
        with replacing(folder) as temporary:
            temporary.mkdir()
            (temporary / "file").write_text(content)

    replace("0")
    with ThreadPoolExecutor(2) as pool:
        writes = [pool.submit(replace, str(i)) for i in range(30)]
        while not all(write.done() for write in writes):
            assert (folder / "file").exists()
        assert [write.result() for write in writes] == [None] * 30
    assert [path.name for path in tmp_path.iterdir()] == ["gallery"]
