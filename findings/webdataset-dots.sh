#!/usr/bin/env bash
# Images of a tar file whose names have a dot before the suffix vanish when `datasets` reads it.
#
# Versions: datasets 5.2.0, webdataset 1.0.2.
#
# Source: by WebDataset's convention, the first dot of a file's name ends the key of its sample, and
# the rest is the name of a column (webdataset issues 237 and 288: by design, since a sample may
# have a.jpg and a.seg.png). `datasets` follows it since its issue 7150 and pull request 7151, and
# infers the columns from the first five samples of the first file.
#
# Input: a tar file of eleven valid images and one label:
#   a.png b.png c.png d.png e.png f.png, gull.png gull.1.png, tern.2023.png tern.2024.png,
#   wren.png wren.cls.
#
# Expected: eleven images and the label, or an error or a warning that names what was left out.
#
# Seen: `load_dataset("webdataset", ...)` returns nine rows without a word. gull.1.png is dropped,
# since "1.png" is a column that the first five samples do not have; tern.2023.png and tern.2024.png
# are one row, whose image is None; the label of wren is dropped. With bird.001.png and bird.002.png
# alone there is one row, with two columns named 001.png and 002.png. `webdataset` itself loses
# nothing: it returns what it found under these names.
#
# Why it matters: cameras, crawlers and data sets of this field number photographs after a dot
# (bird.001.png, img.00001.jpg, 22.05.png). Recall is then measured on a part of the images, and
# whole classes may be missing, with no sign but the number of rows.
#
# The script exits with 0 while this is so, and with 1 once it has changed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet datasets==5.2.0 webdataset==1.0.2 pillow==12.3.0
export HF_DATASETS_CACHE="$work/cache" HF_HUB_OFFLINE=1

cd "$work"
venv/bin/python - <<'PYTHON'
import io
import tarfile
import warnings

import datasets
import webdataset
from PIL import Image

datasets.disable_progress_bars()


def write(path, names):
    """Writes a tar file of small images, and of labels."""
    with tarfile.open(path, "w") as archive:
        for number, name in enumerate(names):
            file = io.BytesIO()
            Image.new("RGB", (8, 8), (10 * number, 0, 0)).save(file, "PNG")
            content = file.getvalue() if name.endswith(".png") else b"7"
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def rows(path):
    """Returns the rows that `datasets` reads, and whether it warned."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        table = datasets.load_dataset("webdataset", data_files=path, split="train")
    return table, [str(warning.message) for warning in caught if "column" in str(warning.message)]


first = [f"{name}.png" for name in "abcdef"]
dotted = ["gull.png", "gull.1.png", "tern.2023.png", "tern.2024.png", "wren.png", "wren.cls"]
late = write("late.tar", [*first, *dotted])
table, warned = rows(late)
images = [row["png"] for row in table]
print(f"datasets: {len(table)} rows, {sum(x is not None for x in images)} images of 11")
seen = {
    "rows": len(table) == 9,
    "images": sum(image is not None for image in images) == 8,
    "columns": {*table.column_names} == {"png", "__key__", "__url__"},
    "silent": not warned,
}

numbered, _ = rows(write("numbered.tar", ["bird.001.png", "bird.002.png"]))
print(f"datasets: {len(numbered)} row with the columns {', '.join(numbered.column_names)}")
seen["numbered"] = len(numbered) == 1 and {"001.png", "002.png"} < {*numbered.column_names}

samples = list(webdataset.WebDataset(late, shardshuffle=False))
names = [f"{x['__key__']}.{name}" for x in samples for name in x if not name.startswith("__")]
print(f"webdataset: {len(samples)} samples with {len(names)} files")
seen["webdataset"] = len(samples) == 9 and sorted(names) == sorted([*first, *dotted])

if changed := [name for name, is_so in seen.items() if not is_so]:
    raise SystemExit(f"this has changed: {', '.join(changed)}")
PYTHON
echo "as described: images whose names have dots are left out without a word"
