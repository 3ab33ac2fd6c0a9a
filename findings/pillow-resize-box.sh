#!/usr/bin/env bash
# Pillow's resize(size, box=box) is not crop(box), then resize(size): it reads pixels beyond the box.
#
# Versions: Pillow 13.0.0, numpy 2.4.6.
#
# Source: https://pillow.readthedocs.io/en/stable/reference/Image.html describes `box` as "the source
# image region to be scaled".
#
# Input: noise of 100 x 120 pixels; a box of 60 x 60 pixels, scaled to 32 x 32.
#
# Expected: the pixels of a crop that is then scaled, as RandomResizedCrop of torchvision computes
# them, without the copy that the crop makes.
#
# Seen: inside they agree, but the two outermost rows and columns differ by up to 25 of 255 levels, since
# the filter's support reaches beyond the box's edges where the image goes on.
#
# Why it matters: whoever saves the copy trains on other pixels than published results. hypjax crops,
# then resizes, so a photo has one copy more on its way to a batch.
#
# The script exits with 0 while this is so, and with 1 once it has changed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet pillow==13.0.0 numpy==2.4.6

"$work/venv/bin/python" - <<'PYTHON'
import sys

import numpy as np
from PIL import Image

noise = np.random.default_rng(0).integers(0, 256, (100, 120, 3), np.uint8)
image, box = Image.fromarray(noise), (10, 10, 70, 70)
cropped = np.int16(image.crop(box).resize((32, 32), Image.Resampling.BICUBIC))
boxed = np.int16(image.resize((32, 32), Image.Resampling.BICUBIC, box=box))
differences = np.abs(cropped - boxed)
inside, anywhere = differences[2:-2, 2:-2].max(), differences.max()
print(f"largest difference inside: {inside}; at the edges: {anywhere}")
sys.exit(not (inside == 0 and anywhere > 10))
PYTHON
