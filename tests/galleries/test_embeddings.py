"""Embeddings of any origin: from arrays, and from files of several kinds."""

import csv
import dataclasses
import sys

import h5py
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from hypjax.data.photos import find_images
from hypjax.errors import UserError
from hypjax.galleries.embeddings import Embeddings, open_gallery, read_features
from hypjax.geometry import Fused, Lorentz, PoincareBall, Sphere
from hypjax.retrieval import inputs

BALL = PoincareBall(0.1, 2.3)


@pytest.fixture(scope="module")
def features():
    return np.random.default_rng(0).normal(size=(21, 5)).astype(np.float32)


@pytest.fixture(scope="module")
def labels():
    return np.arange(21) // 3


@pytest.fixture(scope="module")
def files(features, labels, tmp_path_factory):
    """The same features and labels in files of all kinds, with the file of the labels."""
    folder = tmp_path_factory.mktemp("files")
    np.savez(folder / "a.npz", features=features, labels=labels)
    np.save(folder / "c.npy", features)
    np.save(folder / "labels.npy", labels)
    (folder / "labels.txt").write_text("".join(f"{label}\n" for label in labels))
    columns = {"features": list(features), "label": labels.tolist()}
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "d.parquet")
    numbered = {f"F_{i}": column for i, column in enumerate(features.T, start=1)}
    pyarrow.parquet.write_table(
        pyarrow.table({"Label": labels.astype(float), **numbered}), folder / "f.parquet"
    )
    columns = {"": range(21), "LABEL": labels.astype(float), **dict(enumerate(features.T))}
    with (folder / "g.csv").open("w", newline="") as file:
        csv.writer(file, delimiter=";").writerows([columns, *zip(*columns.values(), strict=True)])
    Embeddings.from_arrays(features, labels, space=BALL).save(folder / "e.npz")
    return [
        *((folder / name, None) for name in ("a.npz", "d.parquet", "e.npz", "f.parquet", "g.csv")),
        *((folder / "c.npy", folder / name) for name in ("labels.npy", "labels.txt")),
    ]


@pytest.mark.parametrize("space", [Sphere(), BALL])
def test_files_of_all_kinds_hold_the_same(files, features, labels, space, monkeypatch):
    monkeypatch.setattr(inputs, "_BLOCK_BYTES", 8 * 4 * 5)  # Three blocks, the last one padded.
    for path, other in files:
        actual = Embeddings.load(path, space, labels=other)
        np.testing.assert_allclose(actual.vectors, space.embed(features), atol=1e-7)
        np.testing.assert_array_equal(actual.features(), features)
        assert actual.labels.tolist() == [str(label) for label in labels]
        np.testing.assert_array_equal(read_features(path, other).features, features)


@pytest.mark.parametrize("space", [Sphere(), BALL])
def test_points_may_take_the_memory_of_their_features(files, space):
    kept, overwritten = (Embeddings.load(files[0][0], space, overwrite=x) for x in (False, True))
    np.testing.assert_array_equal(overwritten.vectors, kept.vectors)
    assert overwritten.raw_features is None
    assert overwritten.all_clipped() == kept.all_clipped()


def test_arrays_have_usual_names_or_those_of_options(features, tmp_path):
    names = [b"wren", b"robin", b"wr\xc3\xa9n"] * 7
    np.savez(tmp_path / "a.npz", X=features, y=names, image=np.zeros((21, 2, 2, 3)), kind=names)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["train/Embeddings"], file["train/target"] = features, names
        file["kind"] = np.array(names, object)
        file.create_dataset("pixels", (10**9, 10**9), "f4")  # More than any memory.
    columns = {"embedding": [*features]} | {
        x: [n.decode() for n in names] for x in ("Class", "kind")
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    for name, matrix in (("a.npz", "X"), ("a.h5", "train/Embeddings"), ("a.parquet", "embedding")):
        path = str(tmp_path / name)
        for where in (path, f"{path}?label=kind", f"{path}?features={matrix}&label=kind"):
            table = read_features(where)
            np.testing.assert_array_equal(table.features, features)
            assert table.labels.tolist() == ["wren", "robin", "wrén"] * 7
            loaded = Embeddings.load(where)
            assert loaded.labels.tolist() == find_images(where).class_names.tolist()
            assert len(open_gallery(where)) == 21
    with h5py.File(tmp_path / "a.h5", "a") as file:
        file["test/Embeddings"], file["numbers"] = features, np.arange(21.0)
    assert read_features(f"{path[:-8]}.h5?features=test/Embeddings&label=numbers").labels[3] == "3"
    with pytest.raises(UserError, match="test/Embeddings and train/Embeddings; name its features"):
        read_features(tmp_path / "a.h5")
    (tmp_path / "a.h5").write_bytes(b"no file of HDF5")
    with pytest.raises(UserError, match="cannot read .*a.h5 "):
        read_features(tmp_path / "a.h5")


def test_arrays_of_other_files_are_refused(features, tmp_path):
    other, values = tmp_path / "other.h5", tmp_path / "values"
    with h5py.File(other, "w") as file:
        file["train/features"] = features
    features.tofile(values)
    layout = h5py.VirtualLayout(features.shape, features.dtype)
    layout[:] = h5py.VirtualSource(other, "train/features", features.shape)
    kind = features.shape, features.dtype
    for name, write in (
        ("features", lambda file: file.create_dataset("features", *kind, external=str(values))),
        ("a/features", lambda file: file.create_virtual_dataset("a/features", layout)),
        ("features", lambda file: file.update(features=h5py.ExternalLink(other, "train/features"))),
        ("train", lambda file: file.update(train=h5py.ExternalLink(other, "train"))),
    ):
        with h5py.File(tmp_path / "a.h5", "w") as file:
            write(file)
        with pytest.raises(UserError, match=f"{name} points elsewhere; copy its values into this"):
            read_features(tmp_path / "a.h5")


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(UserError, match=r"reading a .h5 file needs h5py: pip install .*hdf5"):
        read_features(tmp_path / "a.h5")


def test_numbered_columns_may_be_in_any_order(tmp_path):
    (tmp_path / "a.csv").write_text("f2,label,f1,f3\n2,x,1,3\n")
    assert read_features(tmp_path / "a.csv").features.tolist() == [[1, 2, 3]]


def test_files_of_torch(features, labels, tmp_path):
    torch, path = pytest.importorskip("torch", reason="needs torch"), tmp_path / "a.pt"
    tensor, names = torch.tensor(features, requires_grad=True), [f"{x}.0" for x in labels]
    for content in (tensor, {"features": tensor.detach().double(), "label": names}):
        torch.save(content, path)
        table = read_features(path)
        np.testing.assert_array_equal(table.features, features)
    assert table.labels.tolist() == [str(label) for label in labels]
    torch.save(torch.tensor(labels), tmp_path / "b.pt")
    assert read_features(path, tmp_path / "b.pt").labels.tolist() == table.labels.tolist()
    for content, keyword in (([tensor, 1], "holds a list"), (BALL, "damaged, or more")):
        torch.save(content, path)
        with pytest.raises(UserError, match=keyword):
            read_features(path)


def test_a_file_remembers_its_space_and_points_are_taken_as_they_are(features, tmp_path):
    fused = Fused(((Sphere(), 10.0), (PoincareBall(0.5, 2.0), 2.5)))
    for space in (fused, PoincareBall(0.1, 2.3, True), Lorentz(0.3), BALL):
        points, ids = np.asarray(space.embed(features)), [f"{i}.png" for i in range(21)]
        known = {"unreadable": {"x": "torn"}, "versions": np.arange(21), "fingerprint": "f"}
        actual = Embeddings(points, np.array(ids), np.full(21, ""), space, **known)
        actual.save(tmp_path / "p.npz")
        again = Embeddings.load(tmp_path / "p.npz")
        assert again.space == space and again.ids[3] == "3.png" and set(again.labels) == {""}
    with pytest.raises(UserError, match="the sphere .* are no inner products"):
        dataclasses.replace(again, space=fused).search_vectors()
    # Points are mapped to another space by way of their features, as far as these are known.
    mapped = Embeddings.load(tmp_path / "p.npz", Sphere())
    assert all(np.array_equal(getattr(mapped, name), known[name]) for name in known)
    np.testing.assert_allclose(
        mapped.vectors,
        features / np.linalg.norm(features, axis=1, keepdims=True),
        atol=1e-6,
    )
    for factor, words in ((np.nan, "is not finite"), (100, "points are what space.embed")):
        with pytest.raises(UserError, match=f"embedding 0 .*{words}"):
            dataclasses.replace(actual, vectors=features * factor).save(tmp_path / "p.npz")


def test_all_that_is_known_of_the_images_survives(features, labels, tmp_path):
    columns = {
        "ids": labels.astype(str),
        "splits": np.full(21, "test"),
        "coarse_labels": labels // 2,
    }
    np.savez(tmp_path / "a.npz", features=features.astype(np.float16), labels=labels, **columns)
    Embeddings.load(tmp_path / "a.npz").save(tmp_path / "b.npz")
    actual = Embeddings.load(tmp_path / "b.npz")
    assert actual.raw_features.dtype == np.float16
    for name, values in columns.items():
        assert getattr(actual, name).tolist() == [str(value) for value in values.tolist()]
    few = actual.take(np.array([2, 5]))
    assert few.coarse_labels.tolist() == ["0", "0"] and few.raw_features.shape == (2, 5)


@pytest.mark.parametrize(
    ("header", "changed"), [(b"'<U8'", b"'<U7'"), (b"(21000, 5)", b"(21000, 4)")]
)
def test_a_shorter_array_in_a_damaged_header_is_refused(features, header, changed, tmp_path):
    path, labels = tmp_path / "a.npz", [f"class{i:03}" for i in range(21)]
    np.savez(path, features=np.tile(features, (1000, 1)), labels=1000 * labels)
    content = path.read_bytes()
    assert header in content
    path.write_bytes(content.replace(header, changed))
    with pytest.raises(UserError, match="damaged"):
        Embeddings.load(path)


def test_what_is_no_file_of_features_is_refused_in_one_sentence(tmp_path):
    for name, content, keyword in (
        ("a.npz", {"features": np.array([[1.0, 2], [np.nan, 1]])}, "row 1"),
        ("a.npz", {"features": np.eye(3), "labels": np.ones(2, int)}, r"shape \[2\]"),
        ("a.npz", {"features": np.eye(2), "labels": [1, 0.5]}, "labels of .*a.npz, row 1: 0.5 is "),
        ("a.npz", {"features": np.eye(2), "labels": [b"a", b"\xe9"]}, r"a.npz, row 1: b'\\xe9' "),
        ("a.npz", {"features": np.eye(2), "splits": ["test", "eval"]}, "test and eval are both"),
        ("a.npz", {"matrix": np.eye(2)}, r"no array features; name one by .* \(matrix\)"),
        ("a.npz", {"emb": np.eye(2), "x": np.eye(2)}, "columns emb and x; name its features by"),
        ("a.npz?label=y", {"features": np.eye(2)}, "no column y; its columns are features"),
        ("a.npz", {"labels": np.array(["a"], object)}, r"dtype object; .*labels.astype\(str\)"),
        ("a.csv", b"path,label\na.jpg,x\n", "no column features"),
        ("a.csv", b"f0,f1,extra\n1,2,3\n", r", extra\)"),
        ("a.csv", b"f1,f0,f3\n1,2,3\n", r": f1, f0, f3\)"),
        ("a.csv", b"0.3,0.2\n0.3,0.4\n", "no column features"),
        ("a.csv", b"label,f0,f1\nx,1,2\ny,1\n", "Expected 3 columns, got 2"),
        ("a.csv", b"path,f0,f1\nx,1,2\ny,1,\n", "row 1 "),
        ("a.npz", {"features": np.zeros((2, 3))}, "row 0 .* all zeros"),
        ("a.txt", b"text", "must end in .npz, .npy, .parquet"),
        ("a.parquet", pyarrow.table({"features": [[1.0], [1.0, 2.0]]}), "differ in length"),
    ):
        path = tmp_path / name.partition("?")[0]
        if isinstance(content, dict):
            np.savez(path, **content)
        elif isinstance(content, bytes):
            path.write_bytes(content)
        else:
            pyarrow.parquet.write_table(content, path)
        with pytest.raises(UserError, match=keyword):
            Embeddings.load(tmp_path / name)
