"""The report of runs."""

import functools
import html.parser
import math
import re
import shutil
from types import SimpleNamespace

import pytest

from hypjax import train
from hypjax.analysis.report import Search, _chosen, read_log, report_data
from hypjax.analysis.report_page import _curve, _marked
from hypjax.analysis.run_embeddings import open_runs
from hypjax.data.splits import open_splits
from hypjax.errors import Interrupted, UserError
from hypjax.runs.files import read_results
from hypjax.runs.workdir import read_warnings, saved_config
from hypjax.system import console
from tests.helpers import commands, small_runs


@pytest.fixture(scope="module")
def runs(photos_folder, tmp_path_factory):
    """A run, and copies that name another weight decay and other test images."""
    root = tmp_path_factory.mktemp("runs")
    train.train_and_evaluate(small_runs.load(photos_folder), root / "hyp")
    small_runs.copy_with(root / "hyp", root / "decay", {"optim.weight_decay": 0.5})
    small_runs.copy_with(root / "hyp", root / "other", {"data.split_seed": 1})
    return root


write = functools.partial(commands.call, "report")


class Page(html.parser.HTMLParser):
    """What a page holds."""

    def __init__(self, text):
        super().__init__()
        self.links, self.images, self.items, self.ids, self.open = [], [], [], set(), []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.links += [attrs[name] for name in ("href", "src") if name in attrs]
        self.images += [attrs] if tag == "img" else []
        self.items += [attrs] if tag == "li" else []
        self.ids |= {attrs["id"]} if "id" in attrs else set()
        if tag not in ("img", "meta", "br", "line"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag != "line":
            assert self.open.pop() == tag


def test_a_page_shows_two_runs_and_needs_nothing_else(runs, tmp_path, capsys):
    output = tmp_path / "report.html"
    where = [f"--workdir={runs / name}" for name in ("hyp", "decay")]
    write(*where, f"--output={output}", "--queries=10", "--k=3")
    assert capsys.readouterr().out == f"wrote {output}\n"
    text = output.read_text()
    page = Page(text)
    assert not page.open
    for link in page.links:
        assert link.startswith("data:image/") or link.removeprefix("#") in page.ids
    assert all(image["alt"] for image in page.images)
    assert len(page.items) == 10 and all(item["tabindex"] == "0" for item in page.items)
    assert "optim.weight_decay" in text.split("All fields")[0]  # Differences come first.
    assert len(re.findall(r"δ-hyperbolicity of the head's features 0\.\d+, which", text)) == 2
    assert "3 classes, 18 images" in text and "<dt>encoder</dt>" in text
    assert 'title="batch_recall@1"' in text and ">batch_recall@1" not in text
    for row in text.split(" now, with its 95% interval</th>")[1:]:
        cells = re.findall(r"\d\.\d+ \(", row.split("</tr>")[0])
        best = read_results(runs / "hyp/results.json")["best"]
        assert cells == [f"{best['head']['recall@1']:.3f} ("]  # Equal cells are joined.


def test_runs_of_other_test_images_have_searches_of_their_own(runs, tmp_path, monkeypatch):
    monkeypatch.setattr("hypjax.data.dataset.Dataset.class_name", lambda images, i: "<b>&x")
    where = [f"--workdir={runs / name}" for name in ("hyp", "other")]
    write(*where, f"--output={tmp_path / 'report.html'}", "--queries=4")
    text = (tmp_path / "report.html").read_text()
    assert text.count("the lowest Recall@1") == 2 and len(Page(text).items) == 8
    assert "&lt;b&gt;&amp;x" in text and "<b>&x" not in text
    assert "cannot be compared" in text and "<strong>0." not in text


def test_the_best_scores_of_runs_stand_out():
    marked = _marked([0.5, 0.7, 0.7], list("abc"), True)
    assert [*map(str, marked)] == ["a", "<strong>b</strong>", "<strong>c</strong>"]
    assert _marked([0.5, 0.5, math.nan], list("abc"), True) == ["a", "b", ""]


def failing(queries):
    """What the report reads of a run whose failures are pairs of query and hit."""
    searches = [Search(int(q[1]), [int(h[1])], [0.0], [q[0] == h[0]]) for q, h in queries]
    names = {int(each[1]): (each[0], each) for pair in queries for each in pair}
    failures = sum(not search.right[0] for search in searches)
    images = SimpleNamespace(class_name=lambda i: names[i][0], name=lambda i: names[i][1])
    run = SimpleNamespace(splits=SimpleNamespace(test=images, gallery=None))
    return SimpleNamespace(searches=searches, failures=failures, run=run)


def test_failures_of_runs_take_turns_and_mirrored_ones_are_shown_once():
    first = failing([("ö0", "ŏ1"), ("ŏ1", "ö0"), ("ö2", "ŏ3"), ("o4", "ö0"), ("u5", "u6")])
    assert _chosen([first], 9) == [0, 4, 2, 5]  # The second failure of a pair of classes is later.
    assert _chosen([first], 2) == [0, 5]
    second = failing([("u5", "o4"), ("ŏ1", "ö0"), ("u7", "u5")])
    assert _chosen([first, second], 9) == [0, 5, 4, 1, 2, 7]


@pytest.mark.parametrize(("metric", "low"), [("loss", 0.95), ("images_per_second", 0)])
def test_axes_of_constants_are_sensible(metric, low, figures):
    lines = [{"step": step, metric: 1 + 1e-9 * step} for step in range(5)]
    _curve([SimpleNamespace(log=SimpleNamespace(lines=lines))], metric, metric)
    (axes,) = figures[0].axes
    assert axes.get_ylim() == pytest.approx((low, 1.05))
    assert axes.yaxis.get_offset_text().get_text() == "" and axes.get_legend() is None


def test_searches_and_classes_are_those_of_the_results(runs):
    (run,) = open_runs({str(runs / "hyp"): "hyp"})
    found = report_data(run, k=4)
    results = read_results(runs / "hyp" / "results.json")
    recall = results["best"]["head"]["recall@1"]
    assert found.interval[0] == pytest.approx(recall) and len(found.searches) == 18
    assert found.failures == sum(not search.right[0] for search in found.searches)
    assert recall == pytest.approx(1 - found.failures / 18)
    nearest = [search.distances[0] for search in found.searches]
    low, high = nearest[: found.failures], nearest[found.failures :]
    assert low == sorted(low) and high == sorted(high, reverse=True)
    test = open_splits(saved_config(runs / "hyp")).test
    for search in found.searches:
        assert search.query not in search.hits
        assert search.right == [test.labels[i] == test.labels[search.query] for i in search.hits]
    assert sum(each.recall * each.queries for each in found.classes) == pytest.approx(18 * recall)
    recalls = [each.recall for each in found.classes]
    assert recalls == sorted(recalls)
    wrong = sum(each.times for each in found.classes)
    assert 0 < wrong <= found.failures or not found.failures


@pytest.mark.slow
def test_a_finished_run_writes_its_report(runs, photos_folder, tmp_path, monkeypatch, capsys):
    config = small_runs.load(photos_folder, "run.report=True")
    for name in ("written", "failed", "interrupted"):
        shutil.copytree(runs / "hyp", tmp_path / name)
        (tmp_path / name / "results.json").unlink()
    with monkeypatch.context() as patch:
        patch.setattr("hypjax.train.print_results", lambda *_: console.warn("<few> classes"))
        train.train_and_evaluate(config, tmp_path / "written")
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"the report is {tmp_path}/written/report.html"
    page = (tmp_path / "written/report.html").read_text()
    assert "written" in page and "&lt;few&gt; classes" in page
    assert "<few> classes" in read_warnings(tmp_path / "written")

    def full(*_, **__):
        raise UserError("cannot write to report.html (No space left on device)")

    monkeypatch.setattr("hypjax.analysis.report.write_report", full)
    results = train.train_and_evaluate(config, tmp_path / "failed")
    assert read_results(tmp_path / "failed/results.json") == results
    assert "there is no report: cannot write" in capsys.readouterr().err

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("hypjax.analysis.report.write_report", interrupted)
    with pytest.raises(Interrupted, match="the results are saved; python -m hypjax.report"):
        train.train_and_evaluate(config, tmp_path / "interrupted")
    assert read_results(tmp_path / "interrupted/results.json") == results


def test_damaged_measurements_are_left_out_with_a_warning(runs, tmp_path, capsys):
    shutil.copytree(runs / "hyp", tmp_path / "run")
    whole = read_log(tmp_path / "run")
    with (tmp_path / "run/metrics.jsonl").open("a") as file:
        objects = ['{"loss": 1}', '{"step": "x"}', '{"step": 1, "loss": null}', "[1]", "[" * 9**5]
        objects += ['{"step": 1, "validation": {"head": 3}}', '{"step": 1, "test": 1}', '{"step']
        file.write("\n".join(objects))
    cut = []
    for times in ('{"steps":', '{"seconds": {"steps": "x"}}', '{"seconds": 3}'):
        (tmp_path / "run/times.json").write_text(times)
        cut.append(read_log(tmp_path / "run"))
    assert all(log.lines == whole.lines and log.times == {} for log in cut)
    assert len(whole.lines) > 5 and whole.times["steps"] == 12
    warned = capsys.readouterr().err
    assert "metrics.jsonl is damaged; 8 of its objects are left out" in warned
    assert "times.json is damaged; 1 of its objects are left out" in warned
