#!/usr/bin/env bash
# `import jax` reads and parses the metadata of every installed package.
#
# Versions: jax 0.10.2, jaxlib 0.10.2.
#
# Source: jax/_src/numpy/array_constructors.py looks for a plugin for ROCm among all distributions.
#
# Input: an environment with JAX and the five packages that it needs; then the same one with 200
# further empty packages.
#
# Expected: entry points are searched, whose small files importlib reads without parsing METADATA.
#
# Seen: METADATA of each package is parsed, whether it has to do with JAX or not, so that the import
# takes longer the more packages there are: with 220 packages about 0.13 of 0.9 s of CPU time (Intel
# Xeon), of a search of one photograph that takes 2.
#
# Why it matters: commands that start, answer and end pay for it each time. A slim environment starts
# sooner than any change of imports in hypjax could make it.
#
# The script exits with 0 while this is so, and with 1 once it has changed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv --without-pip "$work/venv"
python3 -m pip --python "$work/venv" install --quiet jax==0.10.2 jaxlib==0.10.2

cat >"$work/count.py" <<'PYTHON'
import importlib.metadata as metadata

parsed, read = [], metadata.PathDistribution.read_text


def counting(self, filename):
    parsed.append(self._path.name) if filename == "METADATA" else None
    return read(self, filename)


metadata.PathDistribution.read_text = counting
import jax  # noqa: E402, F401

print(len(set(parsed)), len([*metadata.distributions()]))
PYTHON

site=$("$work/venv/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")
read -r few few_installed < <("$work/venv/bin/python" "$work/count.py")
for number in $(seq 200); do
  folder="$site/empty_$number-1.0.dist-info"
  mkdir "$folder"
  printf 'Metadata-Version: 2.1\nName: empty-%s\nVersion: 1.0\n' "$number" >"$folder/METADATA"
done
read -r many many_installed < <("$work/venv/bin/python" "$work/count.py")
echo "parsed: $few of $few_installed packages; then $many of $many_installed"
[[ "$few" == "$few_installed" && "$many" == "$many_installed" && "$many" -gt 200 ]]
