"""Trees as files, and tables of their scores."""

import re

import numpy as np
import pytest

from hypjax.analysis import hierarchy_result as hierarchy
from hypjax.analysis.hierarchy_result import Found, Nodes, Purity, Radii, Scores
from hypjax.analysis.trees import Separation, Tree

TOKEN = re.compile(r"'((?:[^']|'')*)'(?::([^,();]+))?|([(),;])")


def parse_newick(text):
    """Returns {name: (name of the parent, length)} of a tree with quoted names."""
    assert TOKEN.sub("", text) == "\n"
    found, waiting, open_nodes = {}, [], []
    for name, length, mark in TOKEN.findall(text):
        if mark == "(":
            open_nodes.append([])
        elif mark == ")":
            waiting = open_nodes.pop()
        elif not mark:
            name = name.replace("''", "'")
            found[name] = (None, float(length or 0))
            for child in waiting:
                found[child] = (name, found[child][1])
            waiting = []
            if open_nodes:
                open_nodes[-1].append(name)
    return found


def test_newick_is_read_back():
    names = ["a's (b), [c]:\n;", "Ж/2", "it's", "top"]
    tree = Tree(np.array([2, 3, 3, -1]), 2)
    nodes = Nodes(tree, names, [{}] * 4, np.array([0.25, 1e-9, 3.5, 0.0]))
    clean = [" ".join(name.split()) for name in names]
    expected = {clean[0]: (clean[2], 0.25), clean[1]: (clean[3], 1e-9)}
    expected |= {clean[2]: (clean[3], 3.5), clean[3]: (None, 0.0)}
    assert parse_newick(hierarchy.newick(nodes)) == expected


def test_nodes_name_their_parents():
    nodes = Nodes(Tree(np.array([1, -1]), 1), ["x", "top"], [{"radius": 1.5}, {}], np.array([2, 0]))
    assert hierarchy.nodes_json(nodes) == [
        {"parent": 1, "name": "x", "length": 2, "radius": 1.5},
        {"parent": None, "name": "top", "length": 0},
    ]


def found(name, radii=None):
    purity = {"class": Purity(0.5, 0.25), "genus": Purity(0.75, 0.5)}
    trees = [Scores("average linkage", 7, 3, purity, {"genus": Separation(0.625, np.nan)})]
    return Found(name, trees, radii)


def test_tables_have_a_line_for_each_tree():
    radii = Radii(4.6, np.nan, 8, 0, 3, 0.5, 1.0)
    runs = [found("long-name"), found("b", radii)]
    lines = hierarchy.scores_table(runs).splitlines()
    assert lines[2].split() == [
        *("long-name", "average", "linkage", "7", "3"),
        *("0.5000", "(0.2500)", "0.7500", "(0.5000)", "0.6250", "nan"),
    ]
    # A grouping stands above its purity.
    assert lines[0].index("genus:") + len("genus:") == lines[1].rindex("(chance)") + len("(chance)")
    assert hierarchy.radii_table(runs).splitlines()[1].split()[:4] == ["b", "0", "of", "8"]
    assert hierarchy.radii_table(runs[:1]) == ""
    first, second = hierarchy.as_json(runs)
    assert "radii" not in first and second["radii"]["median_of_proxies_used"] is None
    assert first["trees"][0]["separation"]["genus"] == {"nearer": 0.625, "correlation": None}
    assert first["trees"][0]["purity"]["class"] == pytest.approx({"purity": 0.5, "chance": 0.25})
