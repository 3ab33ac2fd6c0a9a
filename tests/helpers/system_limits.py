"""Limits of the system that tests impose: full disks, lost power and missing permissions."""

import contextlib
import ctypes
import fcntl
import os
import struct
import subprocess

import pytest

_LINUX_CAPABILITY_VERSION_3 = 0x20080522
_READ_AND_WRITE_ALL = 0b110  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH.
_EXT4_SHUTDOWN = 0x8004587D
_WITHOUT_FLUSH = 2


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


def fill(disk):
    """Writes a file `filler` until a disk is full."""
    with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))


class LossyDisk:
    """A file system whose power can be cut: what was not synced is lost. Or skips the test."""

    def __init__(self, folder):
        self.path, self._image = folder / "disk", folder / "disk.ext4"
        self.path.mkdir()
        with self._image.open("wb") as file:
            file.truncate(2**26)
        self._run("mkfs.ext4", "-q", "-F", self._image)
        self._run("mount", "-o", "loop", self._image, self.path)

    def cut_power(self):
        """Drops what is in no journal, and mounts what is left."""
        folder = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(folder, _EXT4_SHUTDOWN, struct.pack("I", _WITHOUT_FLUSH))
        except OSError as error:
            pytest.skip(f"the power of a file system cannot be cut here ({error.strerror})")
        finally:
            os.close(folder)
        self.unmount()
        self._run("mount", "-o", "loop", self._image, self.path)

    def unmount(self):
        """Unmounts the file system, once nothing uses it."""
        subprocess.run(["umount", str(self.path)], check=True)

    def _run(self, *command):
        try:
            subprocess.run(list(map(str, command)), check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("file systems cannot be made or mounted here")


@contextlib.contextmanager
def lossy_disk(folder):
    disk = LossyDisk(folder)
    try:
        yield disk
    finally:
        disk.unmount()


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
