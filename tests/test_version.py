"""The version of an installation from a clone, which is that of the last tag."""

import shlex
import subprocess
import tomllib

from tests.helpers.small_runs import REPOSITORY


def test_a_tag_that_is_no_version_does_not_count(tmp_path):
    scm = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools_scm"]

    def git(command):
        words = ["git", "-c", "user.name=me", "-c", "user.email=me@host", *shlex.split(command)[1:]]
        return subprocess.run(
            words, cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    git("git init")
    for tag in ("v0.1.0", "nightly-2"):
        git("git commit --allow-empty -m change")
        git(f"git tag {tag}")
    assert git(scm["scm"]["git"]["describe_command"]).startswith("v0.1.0-1-")
