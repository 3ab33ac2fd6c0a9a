"""Limits of the system that tests impose: full disks and missing permissions."""

import contextlib
import ctypes
import os
import struct
import subprocess

import pytest

_LINUX_CAPABILITY_VERSION_3 = 0x20080522
_READ_AND_WRITE_ALL = 0b110  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH.


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
    """Drops root's right to read and write everything.

    The user stays root, who alone may reach a clone in /root.
    """
    if os.geteuid():
        yield
        return
    libc = ctypes.CDLL(None)
    header = struct.pack("Ii", _LINUX_CAPABILITY_VERSION_3, 0)
    before = ctypes.create_string_buffer(24)
    if libc.capget(header, before):
        pytest.skip("capabilities cannot be read here")
    effective, *others = struct.unpack("6I", before.raw)
    if libc.capset(header, struct.pack("6I", effective & ~_READ_AND_WRITE_ALL, *others)):
        pytest.skip("capabilities cannot be dropped here")
    try:
        yield
    finally:
        libc.capset(header, before)
