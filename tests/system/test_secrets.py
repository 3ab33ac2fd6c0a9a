"""Credentials in URLs appear in no message and no file."""

import fsspec
import pytest

from hypjax import train
from hypjax.config import identity, load_config
from hypjax.errors import UserError, redacted
from hypjax.system import cloud
from tests.helpers import small_runs


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("cannot read ftp://user:hunter2@host/a (no)", "cannot read ftp://***@host/a (no)"),
        ("s3://key:se/cret@host", "s3://key:se/cret@host"),  # No URL has such a login.
        ("https://host/a?token=hunter2&x=1 here", "https://host/a?*** here"),
        ("'gs://user:hunter2@b/c?sig=hunter2'", "'gs://***@b/c?***'"),
        ("gs://bucket/folder, photos/*.jpg? and me@host", None),
        ("github://me:hunter2@repository", "github://***@repository"),
    ],
)
def test_logins_and_queries_are_hidden(text, shown):
    assert redacted(text) == (shown or text)
    assert str(UserError(text)) == (shown or text)


def test_a_run_keeps_no_secret(photos_folder, tmp_path, monkeypatch, capsys):
    """Not in the cloud, in the local copy, in messages, or in its configuration."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("sys.orig_argv", ["python", "--workdir=local://user:hunter2@host/run"])
    storage = fsspec.filesystem("dir", path=str(tmp_path / "storage"), fs=fsspec.filesystem("file"))
    (tmp_path / "storage" / "run").mkdir(parents=True)
    monkeypatch.setattr(fsspec.core, "url_to_fs", lambda url: (storage, "run"))
    cloud._warn_of_secrets.cache_clear()
    config = small_runs.load(photos_folder, "run.data_dir=ftp://user:hunter2@host/data")
    url = "ftp://user:hunter2@host/run?token=hunter2"
    train.train_and_evaluate(config, url)
    printed = capsys.readouterr()
    assert "hunter2" not in printed.out + printed.err and "ftp://***@host/run?***" in printed.out
    assert printed.err.count("warning: a URL holds credentials") == 1
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"run.json", "config.json", ".mirror.json", "writer.json"} <= {p.name for p in files}
    for path in files:
        assert b"hunter2" not in path.read_bytes(), path


def test_runs_with_other_tokens_are_the_same(photos_folder):
    one, other = (
        small_runs.load(photos_folder, f"model.weights=gs://{login}@b/run")
        for login in ("a:b", "c")
    )
    assert identity(one) == identity(other)


@pytest.mark.parametrize("workdir", ["://", "gs://", "://bucket/run", "gs:///"])
def test_what_only_looks_like_a_url_is_refused(workdir):
    with pytest.raises(UserError, match="is neither a path nor a URL, such as gs://bucket/folder"):
        cloud.is_url(workdir)


def test_a_storage_that_ends_with_the_process_is_refused(repository):
    config = load_config(str(repository / "configs/glyphs.py"))
    with pytest.raises(UserError, match="memory://run is gone when this process ends"):
        train.train_and_evaluate(config, "memory://run")
