"""Credentials in URLs appear in no message and no file."""

from hypjax.config import flatten, identity
from hypjax.errors import UserError, redacted
from tests.helpers import small_runs


def test_logins_and_queries_are_hidden():
    for text, shown in (
        ("cannot read ftp://user:hunter2@host/a (no)", "cannot read ftp://***@host/a (no)"),
        ("s3://key:se/cret@host", "s3://key:se/cret@host"),  # No URL has such a login.
        ("https://host/my run?token=hunter2&x=1 here", "https://host/my run?token=***&x=*** here"),
        ("https://host/a#access_token=hunter2", "https://host/a#access_token=***"),
        ("s3://bucket/a?versionId=3&sig=hunter2", "s3://bucket/a?versionId=3&sig=***"),
        ("'gs://user:hunter2@b/c?sig=hunter2'", "'gs://***@b/c?sig=***'"),
        ("abfs://container@account/run and github://org:repo@main/run", None),
    ):
        assert redacted(text) == str(UserError(text)) == (shown or text)


def test_runs_with_other_tokens_are_the_same_and_with_other_places_are_not(photos_folder):
    def identity_of(weights):
        return identity(flatten(small_runs.load(photos_folder, f"model.weights={weights}")))

    assert identity_of("gs://a:b@b/run?token=x") == identity_of("gs://c:d@b/run?token=y")
    assert identity_of("abfs://one@account/run") != identity_of("abfs://two@account/run")
    assert identity_of("s3://b/run?versionId=1") != identity_of("s3://b/run?versionId=2")
