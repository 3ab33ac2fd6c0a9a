#!/usr/bin/env bash
# Pillow inverts WhiteIsZero in TIFF files of 8 bits, but not of 16, and divides palettes by 256.
#
# Version: Pillow 13.0.0.
#
# Source: TIFF 6.0, tag 262: in WhiteIsZero (0), the value 0 is white, whatever the number of bits;
# tag 320: colour maps have 16 bits, and libtiff reads one whose values are all below 256 as 8 bits.
# Pillow's issue 2157 reports black images of such palettes.
#
# Input: three valid TIFF files of a ramp from white to black: WhiteIsZero of 8 and of 16 bits, and a
# palette whose colour map holds 0 to 255, as older scanners and microscopes write it.
#
# Expected: all three are white on the left and black on the right.
#
# Seen: the ramp of 8 bits is right. That of 16 bits is black on the left and white on the right. All
# of the palette's colours are black or nearly so.
#
# Why it matters: scans and micrographs are TIFF files. An encoder sees negatives of the images of
# one class, or black squares, and distances between them mean nothing, without a warning.
#
# The script exits with 0 while this is so, and with 1 once it has changed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet pillow==13.0.0 numpy==2.4.0

cd "$work"
venv/bin/python - <<'PYTHON'
import struct

import numpy as np
import PIL
from PIL import Image

RAMP = np.tile(np.linspace(0, 255, 64), (48, 1)).astype(np.uint8)  # 0 is white in the files.


def write(name, values, photometric, colour_map=None):
    """Writes an uncompressed TIFF file of one strip."""
    bits = 8 * values.itemsize
    rows = [(256, 64), (257, 48), (258, bits), (259, 1), (262, photometric), (273, None)]
    rows += [(277, 1), (278, 48), (279, values.nbytes)]
    rows += [(320, colour_map)] * (colour_map is not None)
    after = 8 + 2 + 12 * len(rows) + 4
    tail = b"" if colour_map is None else colour_map.tobytes()
    entries = b""
    for tag, value in rows:
        if isinstance(value, np.ndarray):
            entries += struct.pack("<HHII", tag, 3, value.size, after)
        else:
            value = after + len(tail) if value is None else value
            entries += struct.pack("<HHII", tag, 4, 1, value)
    header = b"II*\0" + struct.pack("<IH", 8, len(rows))
    with open(name, "wb") as file:
        file.write(header + entries + struct.pack("<I", 0) + tail + values.tobytes())


write("grey8.tif", RAMP, 0)
write("grey16.tif", RAMP.astype("<u2") * 257, 0)
write("palette.tif", RAMP, 3, np.tile(np.arange(255, -1, -1), 3).astype("<u2"))


def ends(name):
    """The grey values at the left and at the right, as shares of the largest value."""
    image = Image.open(name)
    whole = 65535 if image.mode.startswith("I") else 255
    values = np.asarray(image.convert("L") if whole == 255 else image) / whole
    print(f"Pillow {PIL.__version__}, {name}: {values[0, 0]:.2f} to {values[0, -1]:.2f}")
    return round(float(values[0, 0]), 1), round(float(values[0, -1]), 1)


seen = {name: ends(f"{name}.tif") for name in ("grey8", "grey16", "palette")}
if seen != {"grey8": (1, 0), "grey16": (0, 1), "palette": (0, 0)}:
    raise SystemExit("this has changed")
PYTHON
echo "as described: WhiteIsZero of 16 bits is not inverted, and palettes of 8 bits are black"
