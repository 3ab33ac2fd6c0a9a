"""Tables of the papers: what runs them, and our values beside the published ones."""

import csv
import json
import pathlib

import pytest

from hypjax.errors import UserError
from papers import tables as paper_tables
from tests.helpers import commands

MAIN, PCA = "python -m hypjax.main --config=configs/", "--config.eval.pca.encoder=128"
DELTA = MAIN.replace("main", "hyperbolicity")
EVALUATE, OUTPUT = "--mode=evaluate", "--output=runs/papers/"


RESNET = "--config.model.architecture=resnet50"
PCA_RUN = f"{OUTPUT}sop-irt-r-eval.pca.encoder=128-trained.json {EVALUATE}"
LINES = {
    "hier-main|HIER-DINO, 384-d cub200": f"{MAIN}cub.py:hier-dino",
    "hyp-vit-4": f"{MAIN}cars.py:hyp-dino-patch8",  # Head and encoder.
    "hyp-vit-3|pretrained DINO cub200": f"{MAIN}cub.py:hyp-dino "
    f"{OUTPUT}cub-hyp-dino-pretrained.json {EVALUATE}",
    "irt-2|pca=128 sop": f"{MAIN}sop.py:irt-r && {MAIN}sop.py:irt-r {PCA} {PCA_RUN} "
    "--workdir=runs/sop-irt-r",
    "hyp-vit-3|ResNet-50 sop": f"{MAIN}sop.py:hyp-dino {RESNET} --config.model.weights="
    "resnet50.tv_in1k --config.model.pooling=avg --config.model.eval_pooling=avg "
    f"{OUTPUT}sop-hyp-dino-a358ec6a-pretrained.json {EVALUATE}",
    "irt-objects-comparison|768-d": f"{MAIN}sfm.py:irt-r-deit-b-384-distilled",
    "hyp-vit-1|ViT sop": f"{DELTA}sop.py:hyp-vit {OUTPUT}sop-hyp-vit-delta.json",
}


@pytest.mark.parametrize("names", LINES)
def test_rows_name_their_commands(folder, names):
    table, *rows = names.split("|")
    assert paper_tables.pending(paper_tables.rows_of(table, rows), []) == [LINES[names]]


def test_an_unknown_table_is_told_all_tables_once():
    with pytest.raises(UserError, match="did you mean hyp-vit-3") as raised:
        paper_tables.rows_of("hyp-vit-33", [])
    assert str(raised.value).count("irt-objects-comparison") == 1


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
    lines = csv.DictReader(pathlib.Path("t.csv").open())
    (row,) = (x for x in lines if (x["method"], x["metric"]) == ("Hyp-DINO", "recall@8"))
    assert [row[name] for name in ("published", "ours", "difference")] == ["95.6", "95.0", "-0.6"]
