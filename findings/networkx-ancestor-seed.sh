#!/usr/bin/env bash
# The lowest common ancestor of networkx depends on the seed of Python's hashes, if there are two.
#
# Version: networkx 3.6.1.
#
# Source: https://networkx.org/documentation/stable/reference/algorithms/lowest_common_ancestors.html
# says that a graph without a unique lowest common ancestor has any of them returned. WordNet and
# other taxonomies are such graphs: their classes have several parents.
#
# Input: two classes with the same two parents, which strings name, asked for with `PYTHONHASHSEED`
# from 0 to 7, as eight processes ask; and the same graph with numbers as names, as a control.
#
# Expected: one answer, such as the ancestor that was added first.
#
# Seen: each of the two parents is returned under some of the seeds. Numbers, whose hashes have no
# seed, have one answer.
#
# Why it matters: scores by taxonomies (the depth of a common ancestor, Wu and Palmer's similarity)
# change from run to run, since Python draws a seed for each process. hypjax counts all shared
# ancestors.
#
# The script exits with 0 while this is so, and with 1 once it has changed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet networkx==3.6.1

cat >"$work/ancestor.py" <<'PYTHON'
import sys

import networkx

names = ["bird", "swimmer", "duck", "goose"] if sys.argv[1] == "strings" else [1, 2, 3, 4]
bird, swimmer, duck, goose = names
edges = [(parent, child) for parent in (bird, swimmer) for child in (duck, goose)]
print(networkx.lowest_common_ancestor(networkx.DiGraph(edges), duck, goose))
PYTHON
answers() {
  for seed in {0..7}; do PYTHONHASHSEED=$seed "$work/venv/bin/python" "$work/ancestor.py" "$1"; done
}
strings=$(answers strings | sort | uniq -c)
numbers=$(answers numbers | sort | uniq -c)
printf 'of eight seeds, with strings:\n%s\nwith numbers:\n%s\n' "$strings" "$numbers"
if [[ $(wc -l <<<"$strings") -ne 2 || $(wc -l <<<"$numbers") -ne 1 ]]; then
  echo "this has changed"
  exit 1
fi
echo "as described: the answer depends on the seed of hashes"
