"""Published results on particular objects: which runs they are shown beside."""

import pytest

from hypjax.config import load_config
from hypjax.runs import published_objects
from hypjax.runs.published import compare


@pytest.fixture
def load(repository):
    return lambda variant, *fields: load_config(f"{repository}/configs/sfm.py:{variant}", fields)


def command(method):
    """Variant and fields of the run that a row reports, as `docs/papers.md` lists them."""
    base, _, change = method.partition(" ")
    field, _, value = change.partition("=")
    fields = {
        "": [],
        "pca": [f"eval.pca.encoder={value}"],
        "lambda": [f"objective.koleo_weight={value}"],
        "pooling": [f"model.{name}={value}" for name in ("pooling", "eval_pooling")],
    }[field]
    if not base.startswith("r"):
        return base, fields
    depth, pooling, size = base.split("-")
    name = {"r50": "resnet50", "r101": "resnet101"}[depth]
    fields += [f"model.architecture={name}", f"model.weights={name}.tv_in1k"]
    fields += [f"model.{name}={pooling}" for name in ("pooling", "eval_pooling")]
    return "irt-l-deit-s", [*fields, f"data.image_size={size}", f"data.resize={size}"]


def test_every_row_belongs_to_a_command(load):
    rows = published_objects.rows()
    # Each for Oxford and Paris: Tables 3, 7 (IRT's and convolutional), 9, and λ from 0 to 5.
    assert len(rows) == 2 * (3 + 6 + 12 + 4 + 6)
    assert {level for row in rows for level in row.scores} == {"medium", "hard"}
    for row in rows:
        variant, fields = command(row.method)
        config = load(variant, *fields)
        assert row in published_objects.find(config, "encoder", pretrained="irt-o" in variant)


@pytest.mark.parametrize(
    "fields",
    [
        ("objective.margin=0.7",),
        ("objective.koleo_weight=0.5",),
        ("objective.space=poincare",),
        ("train.tuples.pool=2000",),
        ("data.flip=0.5",),
        ("data.test_view=centre_crop",),
        ("model.head=dense",),
        ("eval.scales=1,0.5",),
        ("eval.expansion=3",),
        ("eval.pca.encoder=64",),
        ("eval.pca.encoder=128", "eval.whiten=True"),
        ("model.weights=deit_small_distilled_patch16_224.fb_in1k",),
        ("optim.frozen=patch_projection",),
    ],
)
def test_other_settings_have_none(load, fields):
    assert published_objects.find(load("irt-r-deit-s", *fields), "encoder", pretrained=False) == []


def test_the_ball_has_none(load):
    assert published_objects.find(load("hyp-deit-s"), "encoder", pretrained=False) == []


def test_differences_are_shown_for_each_dataset(load):
    scores = {"roxford5k/medium/map": 0.35, "roxford5k/hard/map": 0.1, "rparis6k/hard/map": 0.402}
    both = dict.fromkeys(("head", "encoder"), {"recall@1": 0.5, **scores})
    lines = compare({"final": both}, load("irt-r-deit-s"))
    assert len(lines.splitlines()) == len({*lines.splitlines()}) == 6  # Tables 3 and 7, and of λ.
    first = "roxford5k/medium/map 34.0 (ours +1.0), roxford5k/hard/map 11.5 (ours -1.5)"
    assert f"published (IRT, Table 3, IRT-R-DeiT-S, 384-d): {first}" in lines.splitlines()
    assert (
        "published (IRT, Table 3, IRT-R-DeiT-S, 384-d): rparis6k/hard/map 40.2 (ours +0.0)" in lines
    )
    assert "published (IRT, lambda table, IRT-R-DeiT-S lambda=4.0, 384-d): " in lines
    pretrained = compare({"pretrained": {"encoder": scores}}, load("irt-o-deit-s"))
    assert "IRT-O-DeiT-S, 384-d): roxford5k/medium/map 20.3 (ours +14.7)" in pretrained
