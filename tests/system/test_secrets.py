"""Credentials in URLs appear in no message and no file."""

import fsspec
import pytest

from hypjax.config import identity
from hypjax.errors import UserError, redacted
from hypjax.evaluate import evaluate
from hypjax.system import cloud
from hypjax.training import train
from tests.helpers import small_runs


def test_logins_and_queries_are_hidden():
    for text, shown in (
        ("cannot read ftp://user:hunter2@host/a (no)", "cannot read ftp://***@host/a (no)"),
        ("s3://key:se/cret@host", "s3://key:se/cret@host"),  # No URL has such a login.
        ("ftp://user:p@hunter2@host/a", "ftp://***@host/a"),
        ("ftp://user:my 'hunter2@host/a", "ftp://***@host/a"),
        ("https://host/my run?token=hunter2&x=1 here", "https://host/my run?token=***&x=*** here"),
        ("https://host/a#access_token=hunter2", "https://host/a#access_token=***"),
        ("https://host/a?sig=a'hunter2)", "https://host/a?sig=***)"),
        ("s3://bucket/a?versionId=3&sig=hunter2", "s3://bucket/a?versionId=3&sig=***"),
        ("'gs://user:hunter2@b/c?sig=hunter2'", "'gs://***@b/c?sig=***'"),
        ("abfs://container@account/run and github://org:repo@main/run", None),
        ("gs://bucket/folder, photos/*.jpg? and me@host", None),
    ):
        assert redacted(text) == str(UserError(text)) == (shown or text)


def test_a_long_message_is_cut_after_logins_are_hidden():
    assert "hunter2" not in str(UserError(f"{'x' * 3980} https://user:hunter2@host/folder"))


@pytest.mark.slow
def test_a_run_keeps_no_secret(photos_folder, tmp_path, monkeypatch, capsys):
    """Not in the cloud, in the local copy, in messages, or in its configuration."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("sys.orig_argv", ["python", "--workdir=local://user:hunter2@host/run"])
    storage = fsspec.filesystem("dir", path=str(tmp_path / "storage"), fs=fsspec.filesystem("file"))
    (tmp_path / "storage" / "run").mkdir(parents=True)
    monkeypatch.setattr(fsspec.core, "url_to_fs", lambda url: (storage, "run"))
    config = small_runs.load(photos_folder, "run.data_dir=ftp://user:hunter2@host/data")
    url = "ftp://user:hunter2@host/run?token=hunter2"
    train.train_and_evaluate(config, url)
    evaluate(config, url)
    printed = capsys.readouterr()
    assert "hunter2" not in printed.out + printed.err
    assert "ftp://***@host/run?token=***" in printed.out
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"run.json", "config.json", ".writer"} <= {p.name for p in files}
    for path in files:
        assert b"hunter2" not in path.read_bytes(), path


def test_runs_with_other_tokens_are_the_same_and_with_other_places_are_not(photos_folder):
    def identity_of(weights):
        return identity(small_runs.load(photos_folder, f"model.weights={weights}"))

    assert identity_of("gs://a:b@b/run?token=x") == identity_of("gs://c:d@b/run?token=y")
    assert identity_of("abfs://one@account/run") != identity_of("abfs://two@account/run")
    assert identity_of("s3://b/run?versionId=1") != identity_of("s3://b/run?versionId=2")


def test_what_only_looks_like_a_url_is_refused():
    for workdir in ("://", "gs://", "://bucket/run", "gs:///"):
        with pytest.raises(UserError, match="neither a path nor a URL"):
            cloud.is_url(workdir)
