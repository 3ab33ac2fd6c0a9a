"""Limits of the system that tests impose: disks that fill up and missing permissions."""

import contextlib
import os
import subprocess

import pytest

_NOBODY = 65534


@contextlib.contextmanager
def small_disk(path, size):
    """Mounts a file system of the given size, such as '64k', or skips the test."""
    path.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("file systems cannot be mounted here")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@contextlib.contextmanager
def ordinary_user():
    """Drops root's permission to read and write everything."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(_NOBODY)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
