"""Files and folders that replace others, and arrays in files."""

import pathlib

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pyarrow.parquet
import pytest
from safetensors.numpy import load_file

from hypjax.errors import UserError
from hypjax.galleries.embeddings import Embeddings, find_export, open_gallery
from hypjax.geometry import Sphere
from hypjax.runs.workdir import read_saved_config
from hypjax.system.files import absolute, checksum, read_torch, replacing, write_safetensors

# Unit vectors, which bfloat16 can hold, too.
POINTS = np.eye(5, dtype=np.float32)[[3, 4, 0, 1, 2, 2, 0]] * np.float32([[1, -1, 1, 1, -1]])
LAYOUTS = {
    "Fortran": np.asfortranarray(POINTS),
    "broadcast": np.broadcast_to(POINTS[0], POINTS.shape),
    "big-endian": POINTS.astype(">f4"),
    "bfloat16": np.asfortranarray(POINTS.astype(ml_dtypes.bfloat16)),
    "float16": POINTS.astype(np.float16)[:, ::-1],
    "jax": jnp.asarray(POINTS).T.T,
}


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


def test_a_kill_between_two_renames_leaves_a_folder_that_is_named(tmp_path):
    gallery, left = tmp_path / "a.ann", tmp_path / ".a.ann.previous"
    left.mkdir()
    for use in (read_saved_config, open_gallery):
        with pytest.raises(UserError, match=f"does not exist; .* left it as {left}: rename that"):
            use(gallery)
    with replacing(gallery) as temporary:
        temporary.mkdir()
    assert gallery.is_dir() and not left.exists()


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


def test_objects_of_numpy_in_a_file_of_torch_are_never_built(tmp_path):
    torch = pytest.importorskip("torch", reason="needs torch")
    for value in (np.dtype("f4"), np.float32(1), np.arange(3), np.array([{}, None], object)):
        torch.save({"tensor": torch.ones(2), "other": value}, path := tmp_path / "a.pt")
        with pytest.raises(ValueError, match=r"more than tensors, .*; save tensors: torch.from_nu"):
            read_torch(path)
        content = read_torch(path, ignore_objects=True)
        assert content["other"] == {} and content["tensor"].tolist() == [1, 1]


def test_checksums_differ_where_crc_32_collides():
    assert checksum(b"plumless") != checksum(b"buckeroo")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_hold_the_values_of_arrays_in_any_layout(layout, tmp_path):
    array = LAYOUTS[layout]
    expected = np.array(array.tolist(), np.float32)
    write_safetensors(tmp_path / "a", {"a": array, "scalar": array[0, 0]})
    arrays = load_file(tmp_path / "a")
    np.testing.assert_array_equal(arrays["a"], expected)
    assert arrays["scalar"].shape == () and arrays["scalar"] == expected[0, 0]
    gallery = Embeddings(array, np.arange(7).astype(str), np.full(7, ""), Sphere())
    gallery.save(tmp_path / "a.npz")
    find_export("parquet")(gallery, tmp_path / "a.parquet")
    table = pyarrow.parquet.read_table(tmp_path / "a.parquet")
    for vectors in (Embeddings.load(tmp_path / "a.npz").vectors, table["vector"].to_pylist()):
        np.testing.assert_array_equal(vectors, expected)
