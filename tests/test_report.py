"""The report of runs."""

import html.parser
import shutil

import pytest

from hypjax import report, train
from hypjax.command import parse
from hypjax.data.splits import open_splits
from hypjax.errors import Interrupted, UserError
from hypjax.inference.inspected import inspect, read_log
from hypjax.runs.workdir import read_results, read_warnings, saved_config
from hypjax.system import console
from tests.helpers import small_runs


@pytest.fixture(scope="module")
def runs(photos_folder, tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    for name, margin in (("hyp", "space=poincare"), ("sph", "space=sphere")):
        config = small_runs.load(photos_folder, f"objective.{margin}")
        train.train_and_evaluate(config, root / name)
    return root


def write(*arguments):
    for flag in report.FLAGS:
        report.FLAGS[flag].unparse()
    report.main(*parse(["report", *arguments], report.FLAGS))


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
        if tag not in ("img", "meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_a_page_shows_two_runs_and_needs_nothing_else(runs, tmp_path, capsys):
    output = tmp_path / "report.html"
    where = [f"--workdir={runs / name}" for name in ("hyp", "sph")]
    write(*where, f"--output={output}", "--queries=10", "--k=3")
    assert capsys.readouterr().out == f"wrote {output}\n"
    text = output.read_text()
    page = Page(text)
    assert not page.open
    for link in page.links:
        assert link.startswith("data:image/") or link.removeprefix("#") in page.ids
    assert all(image["alt"] for image in page.images)
    assert len(page.items) == 20 and all(item["tabindex"] == "0" for item in page.items)
    assert "objective.space" in text.split("All fields of")[0]  # Differences come first.
    for name in ("hyp", "sph"):
        recall = read_results(runs / name / "results.json")["best"]["head"]["recall@1"]
        assert f"<strong>{recall:.3f} (" in text


def test_searches_and_classes_are_those_of_the_results(runs):
    found = inspect(runs / "hyp", k=4)
    results = read_results(runs / "hyp" / "results.json")
    recall = results["best"]["head"]["recall@1"]
    assert found.interval[0] == pytest.approx(recall) and len(found.searches) == 18
    assert found.failures == sum(not search.right[0] for search in found.searches)
    assert recall == pytest.approx(1 - found.failures / 18)
    low = [search.distances[0] for search in found.searches[: found.failures]]
    high = [search.distances[0] for search in found.searches[found.failures :]]
    assert low == sorted(low) and high == sorted(high, reverse=True)
    test = open_splits(saved_config(runs / "hyp")).test
    for search in found.searches:
        assert search.query not in search.hits
        assert search.right == [test.labels[i] == test.labels[search.query] for i in search.hits]
    assert sum(each.recall * each.queries for each in found.classes) == pytest.approx(18 * recall)
    recalls = [each.recall for each in found.classes]
    assert recalls == sorted(recalls) and 0 < found.delta < 1
    wrong = sum(each.times for each in found.classes)
    assert 0 < wrong <= found.failures or not found.failures


def test_a_finished_run_writes_its_report(runs, photos_folder, tmp_path, monkeypatch, capsys):
    config = small_runs.load(photos_folder, "objective.space=sphere", "run.report=True")
    for name in ("written", "failed", "interrupted"):
        shutil.copytree(runs / "sph", tmp_path / name)
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

    monkeypatch.setattr("hypjax.training.results.write_report", full)
    results = train.train_and_evaluate(config, tmp_path / "failed")
    assert read_results(tmp_path / "failed/results.json") == results
    assert "there is no report: cannot write" in capsys.readouterr().err

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("hypjax.training.results.write_report", interrupted)
    with pytest.raises(Interrupted, match="the results are saved; python -m hypjax.report"):
        train.train_and_evaluate(config, tmp_path / "interrupted")
    assert read_results(tmp_path / "interrupted/results.json") == results


def test_lines_that_a_kill_has_cut_are_left_out(runs, tmp_path):
    shutil.copytree(runs / "sph", tmp_path / "run")
    whole = read_log(tmp_path / "run")
    with (tmp_path / "run/metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "lo')
    (tmp_path / "run/times.json").write_text('{"steps":')
    cut = read_log(tmp_path / "run")
    assert cut.lines == whole.lines and len(whole.lines) > 5
    assert whole.times["steps"] == 12 and cut.times == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--workdir is missing"),
        (["--workdir=none"], "none holds no run"),
        (["--workdir=a", "--output=a.pdf"], "its name must end in .html"),
        (["--workdir=a", "--output=no/a.html"], "but the folder no does not exist"),
        (["--workdir=a", "--workdir=a"], "is given twice"),
    ],
)
def test_mistakes_are_one_sentence(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        write(*arguments)


def test_names_of_classes_are_text(runs, tmp_path, monkeypatch):
    monkeypatch.setattr("hypjax.inference.inspected._name", lambda images, i: ("<b>&x", "a"))
    write(f"--workdir={runs / 'hyp'}", f"--output={tmp_path / 'r.html'}", "--queries=2")
    text = (tmp_path / "r.html").read_text()
    assert "&lt;b&gt;&amp;x" in text and "<b>&x" not in text
