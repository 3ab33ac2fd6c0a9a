"""Tables of the papers: what runs them, and our values beside the published ones."""

import csv
import json
import pathlib

import pytest

from hypjax.errors import UserError
from papers import tables as paper_tables
from papers.published import published_rows
from tests.helpers import commands

MAIN, PCA = "python -m hypjax.main --config=configs/", "--config.eval.pca.encoder=128"
DELTA = MAIN.replace("main", "hyperbolicity")
EVALUATE, OUTPUT = "--mode=evaluate", "--output=runs/papers/"


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (("hier-main", "HIER-DINO, 384-d cub200"), [f"{MAIN}cub.py:hier-dino"]),
        (("hyp-vit-4",), [f"{MAIN}cars.py:hyp-dino-patch8"]),  # Head and encoder.
        (
            ("hyp-vit-3", "pretrained DINO cub200"),
            [f"{MAIN}cub.py:hyp-dino {OUTPUT}cub-hyp-dino-pretrained.json {EVALUATE}"],
        ),
        (
            ("irt-2", "pca=128 sop"),
            [
                f"{MAIN}sop.py:irt-r && {MAIN}sop.py:irt-r {PCA} {OUTPUT}sop-irt-r-eval.pca.encoder"
                f"=128-trained.json {EVALUATE} --workdir=runs/sop-irt-r"
            ],
        ),
        (("hyp-vit-1", "ViT sop"), [f"{DELTA}sop.py:hyp-vit {OUTPUT}sop-hyp-vit-delta.json"]),
    ],
)
def test_rows_name_their_commands(folder, arguments, lines):
    table, *names = arguments
    assert paper_tables.pending(paper_tables.rows_of(table, names), []) == lines


def test_every_published_row_has_commands(folder):
    tables = {f"{row.paper}-{row.table}" for row in published_rows()}
    rows = {row: x for name in tables for row, x in paper_tables.rows_of(name, []).items()}
    assert len(rows) == len(published_rows())
    lines = paper_tables.pending(rows, ["seed=1"])
    assert all("--config.seed=1" in line for line in lines)


def test_our_values_and_differences_stand_beside_the_published_ones(folder, capsys):
    scores = {"recall@1": 0.8, "recall@2": 0.88, "recall@4": 0.92, "recall@8": 0.95}
    run = pathlib.Path("runs/cub-hyp-dino/results.json")
    run.parent.mkdir(parents=True)
    run.write_text(json.dumps({"final": {"encoder": scores}, "notes": ["a part of the images"]}))
    chosen = "hyp-vit-3", "Hyp-DINO cub200", "sph-dino cub200"
    commands.call("papers", *chosen, "--pending")
    assert capsys.readouterr().out == f"{MAIN}cub.py:sph-dino\n"
    commands.call("papers", *chosen, "--output=t.md")
    text = capsys.readouterr().out
    assert "Hyp-DINO" in text and "80.9, ours 80.0* (-0.9)" in text
    assert "* cub200: a part of the images" in text
    markdown = pathlib.Path("t.md").read_text()
    assert "| Hyp-DINO, 384-d | 80.9, ours 80.0* (-0.9) | 87.6, ours 88.0* (+0.4) |" in markdown
    [row] = [
        line
        for line in csv.DictReader(pathlib.Path("t.csv").open())
        if (line["method"], line["metric"]) == ("Hyp-DINO", "recall@8")
    ]
    assert [row[name] for name in ("published", "ours", "difference")] == ["95.6", "95.0", "-0.6"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((), "name a table"), (("hyp-vit-9",), "irt-2"), (("irt-2", "ViT"), "IRT-R-DeiT-distilled")],
)
def test_unknown_tables_and_rows_are_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        commands.call("papers", *arguments)
