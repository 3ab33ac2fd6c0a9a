"""Runs in cloud storage, by a stand-in for it: an fsspec file system on a folder."""

import json
import shutil
import threading
import time

import fsspec
import numpy as np
import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

from hypjax import mirror, weights
from hypjax.errors import UserError
from hypjax.evaluate import evaluate
from hypjax.mirror import Mirror
from hypjax.remote_runs import reading
from hypjax.train import train_and_evaluate
from tests import photos

URL = "bucket://runs/a"


class Bucket(DirFileSystem):
    """Object storage in a folder, which can be away and notes what is asked of it."""

    protocol = "bucket"
    cachable = False
    root, away, done, copied = None, None, [], None

    def __init__(self, **options):
        super().__init__(str(self.root), LocalFileSystem(auto_mkdir=True), **options)

    def _begin(self, verb, path):
        type(self).done.append((verb, path.removeprefix("runs/a/")))
        if self.away and self.away(verb, path):
            raise OSError("storage away")

    def find(self, path, **options):
        self._begin("find", path)
        return super().find(path, **options)

    def cat_file(self, path, *args, **options):
        self._begin("cat", path)
        return super().cat_file(path, *args, **options)

    def pipe_file(self, path, *args, **options):
        self._begin("put", path)
        return super().pipe_file(path, *args, **options)

    def put_file(self, lpath, rpath, **options):
        self._begin("put", rpath)
        super().put_file(lpath, rpath, **options)

    def get_file(self, rpath, lpath, **options):
        self._begin("get", rpath)
        super().get_file(rpath, lpath, **options)

    def rm_file(self, path):
        self._begin("rm", path)
        super().rm_file(path)


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    fsspec.register_implementation("bucket", Bucket, clobber=True)
    for name, value in {"root": tmp_path / "bucket", "away": None, "done": []}.items():
        monkeypatch.setattr(Bucket, name, value)
    return Bucket


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Moves to a machine of a name, which is its cache folder."""

    def move(name):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))

    move("one")
    return move
