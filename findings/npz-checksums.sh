#!/bin/sh
# numpy.load does not compare the checksum of an .npz member whose header describes a shorter array.
#
# Version: numpy 2.4.0 and zipfile of Python 3.11 to 3.14.
# Source: numpy/lib/_npyio_impl.py (NpzFile.__getitem__) and numpy/lib/_format_impl.py (read_array) read as many
#   bytes as the header asks for; zipfile.ZipExtFile compares the CRC-32 only at the end of a member.
# Input: 4,000 labels of a gallery, saved by numpy.savez; one bit of the header changed, its dtype from <U5 to <U4.
# Expected: the file is refused, since the member has a checksum, and its content has changed.
# Seen: the array is read without an error, and all names but the first are others: the rest stays unread. The same
#   member, read to its end, is refused ("Bad CRC-32"). Members below 4 kB are, since zipfile reads ahead so far.
# Why it matters: a gallery keeps the classes of its images so. A single damaged byte gives all images other classes,
#   and every score that is computed from the file is wrong without a word.
#
# Exits with 0 if numpy still behaves so, with 1 if it has changed.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.0
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import pathlib
import zipfile

import numpy as np

labels = np.array(["finch", "robin", "stork", "crane"] * 1000)
np.savez("gallery.npz", labels=labels)
path = pathlib.Path("gallery.npz")
content = path.read_bytes()
assert content.count(b"<U5") == 1
path.write_bytes(content.replace(b"<U5", b"<U4"))

with np.load(path) as file:
    read = file["labels"].tolist()
print("numpy reads", read[:4], "... instead of", labels[:4].tolist())
try:
    zipfile.ZipFile(path).read("labels.npy")
except zipfile.BadZipFile as error:
    print("zipfile, reading all bytes:", error)
else:
    raise SystemExit("changed: zipfile does not refuse the member")
if read == labels.tolist() or read[0] != "finc":
    raise SystemExit("changed: numpy reads something else")
PYTHON
