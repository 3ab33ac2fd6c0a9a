"""The commands of docs/quoted.toml find the figures that pages quote from them."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib

import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from tests.helpers.commands import REPOSITORY
from tests.helpers.manual import read_page

QUOTED = tomllib.loads((REPOSITORY / "docs/quoted.toml").read_text())
UNREPEATED = QUOTED.pop("unrepeated")
VALUE = re.compile(r"\{([^{}%:]+)(%?):\.(\d)f\}")  # A name, whether in percent, and digits.
FILES = {"GROCERY": "grocery.tar", "CUB": "CUB_200_2011/images", "FEATURES": "features"}


def passages():
    for name, group in QUOTED.items():
        for page, texts in group["quotes"].items():
            yield from ((name, page, text) for text in texts)


def numbers_on(page, text):
    """The numbers that stand on a page where a passage has values in braces."""
    pattern = r"(\d+\.\d+)".join(re.escape(part) for part in VALUE.sub("\0", text).split("\0"))
    matches = [*re.finditer(pattern.replace(r"\ ", r"\s+"), read_page(page))]
    assert len(matches) == 1, f"{page} has no such passage, or several: {text}"
    return matches[0].groups()


@pytest.mark.hygiene
@pytest.mark.parametrize(("name", "page", "text"), passages())
def test_a_quoted_passage_stands_on_its_page_with_the_digits_that_it_names(name, page, text):
    digits = [int(value[3]) for value in VALUE.finditer(text)]
    assert digits == [len(number.split(".")[1]) for number in numbers_on(page, text)]
    assert digits and QUOTED[name]["commands"]


@pytest.mark.hygiene
@pytest.mark.parametrize("page", (REPOSITORY / "docs/results").glob("*.md"), ids=lambda x: x.stem)
def test_figures_of_a_page_of_results_are_repeated_or_it_is_said_why_not(page):
    sections = re.split(r"^##? ", page.read_text(), flags=re.MULTILINE)[1:]
    bodies = {section.split("\n")[0]: section for section in sections}
    excused = UNREPEATED.get(f"results/{page.name}", {})
    assert excused.keys() <= bodies.keys() | {"*"}
    passed = [text for _, where, text in passages() if where == f"results/{page.name}"]
    quoted = [max(VALUE.sub("\0", text).split("\0"), key=len) for text in passed]
    for title, body in bodies.items():
        body = " ".join(body.split())
        is_repeated = any(words in body for words in quoted)
        assert is_repeated or "```sh" not in body or {title, "*"} & excused.keys(), title


@pytest.mark.by_hand
@pytest.mark.parametrize("name", QUOTED)
def test_commands_find_the_figures_again(name, tmp_path):
    group = QUOTED[name]
    printed = run(group["commands"], tmp_path)
    found = {key: float(re.search(x, printed)[1]) for key, x in group.get("prints", {}).items()}
    differing = []
    for page, texts in group["quotes"].items():
        for text in texts:
            for value, number in zip(VALUE.finditer(text), numbers_on(page, text), strict=True):
                name, percent, digits = value.groups()
                now = found[name] if name in found else score(tmp_path / "runs", name)
                now = round(now * (100 if percent else 1), int(digits))
                if abs(now - float(number)) > (group.get("within", 1) + 0.1) / 10 ** int(digits):
                    differing.append(f"{page}: {name} is {now}, not {number}")
    assert not differing, "\n".join(differing)


def run(commands, folder):
    """Runs commands of a shell in a folder, and returns what they print."""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "TFDS_DATA_DIR": str(folder)}
    environment["PATH"] = f"{pathlib.Path(sys.executable).parent}:{environment['PATH']}"
    environment["XLA_FLAGS"] = ""  # Without those of tests.
    for name in FILES.keys() & {*re.findall(r"\$([A-Z]+)", " ".join(commands))}:
        environment[name] = str(unpacked(FILES[name], folder))
    for name in ("configs", "launch", "docs"):
        (folder / name).symlink_to(REPOSITORY / name)
    script = "set -eu\n" + "\n".join(commands)
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.run(["bash", "-c", script], cwd=folder, env=environment, **options)
    assert process.returncode == 0, process.stdout[-3000:]
    return process.stdout


def score(runs, name):
    """A score of runs/RUN/results.json; the mean over runs where RUN has a *."""
    pattern, key = name.split("/")
    results = [json.loads(path.read_text()) for path in runs.glob(f"{pattern}/results.json")]
    assert results, f"no run {pattern} has results"
    return np.mean([flatten_dict(result, sep=".")[key] for result in results])


def unpacked(name, folder):
    """A file or folder of shared/data, copied or unpacked."""
    parents = [REPOSITORY, *REPOSITORY.parents]
    paths = [x for x in (parent / "shared/data" / name for parent in parents) if x.exists()]
    if not paths:
        pytest.skip(f"needs shared/data/{name}")
    if paths[0].is_dir():
        return shutil.copytree(paths[0], folder / name)
    with tarfile.open(paths[0]) as archive:
        archive.extractall(folder / "files", filter="data")
    (path,) = (folder / "files").iterdir()
    return path
