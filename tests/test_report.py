"""The report of runs."""

import re
import shutil

import pytest

from hypjax import train
from hypjax.analysis.report import write_own_report
from hypjax.analysis.run_embeddings import open_runs
from hypjax.analysis.run_hits import search_test_images
from hypjax.assemble import open_splits
from hypjax.errors import UserError
from hypjax.runs.files import STARTS, read_object
from hypjax.runs.workdir import saved_config
from hypjax.system import console
from tests.helpers import commands, small_runs


@pytest.mark.slow
def test_a_page_shows_two_runs_and_needs_nothing_else(run, tmp_path, monkeypatch):
    monkeypatch.setattr("hypjax.data.dataset.Dataset.class_name", lambda images, i: "<b>&x")
    decay = small_runs.copy_with(run, tmp_path / "decay", {"optim.weight_decay": 0.5})
    other = small_runs.copy_with(run, tmp_path / "other", {"data.split_seed": 1})
    output = tmp_path / "report.html"
    where = [f"--workdir={folder}" for folder in (run, decay)]
    commands.call("report", *where, f"--output={output}", "--queries=10", "--k=3")
    text = output.read_text()
    links = re.findall(r' (?:href|src)="(.*?)"', text)
    assert all(link.startswith(("data:image/", "#")) for link in links)
    assert text.count('<li tabindex="0"') == 10
    assert "optim.weight_decay" in text
    assert len(re.findall(r"δ-hyperbolicity of the head's features 0\.\d+, which", text)) == 2
    assert "3 classes, 18 images" in text and "&lt;b&gt;&amp;x" in text and "<b>&x" not in text
    with pytest.raises(UserError, match="different test images"):
        commands.call("report", where[0], f"--workdir={other}", f"--output={output}")


def test_searches_and_classes_are_those_of_the_results(run):
    (opened,) = open_runs([run])
    report = search_test_images(opened, k=4)
    recall = read_object(run / "results.json")["best"]["head"]["recall@1"]
    assert report.interval[0] == pytest.approx(recall) and len(report.searches) == 18
    assert report.failures == sum(not search.right[0] for search in report.searches)
    assert recall == pytest.approx(1 - report.failures / 18)
    nearest = [search.distances[0] for search in report.searches]
    low, high = nearest[: report.failures], nearest[report.failures :]
    assert low == sorted(low) and high == sorted(high, reverse=True)
    test = open_splits(saved_config(run)).test
    for search in report.searches:
        assert search.query not in search.hits
        assert search.right == [test.labels[i] == test.labels[search.query] for i in search.hits]
    hits = sum(of_class.recall * of_class.queries for of_class in report.classes)
    assert hits == pytest.approx(18 * recall)


@pytest.mark.slow
def test_a_finished_run_writes_its_report_with_its_warnings(run, tmp_path, monkeypatch, capsys):
    copy = shutil.copytree(run, tmp_path / "written")
    (copy / "results.json").unlink()
    monkeypatch.setattr("hypjax.train.print_results", lambda *_: console.warn("<few> classes"))
    train.train_and_evaluate(saved_config(copy), copy, report=write_own_report)
    assert capsys.readouterr().out.endswith(f"the report is {copy}/report.html\n")
    page = (copy / "report.html").read_text()
    assert "written" in page and "&lt;few&gt; classes" in page
    assert "<few> classes" in read_object(copy / STARTS)["warnings"]
