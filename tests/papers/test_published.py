"""Published results: which runs they belong to, and how they are compared."""

import pytest

from hypjax.config import flatten, load_config
from papers import published
from papers.published import compare

RESULTS = {
    "final": dict.fromkeys(("head", "encoder"), {"recall@1": 0.5, "roxford5k/medium/map": 0.5})
}


def load(spec, *overrides):
    return load_config(spec, overrides)


FIRST = [  # Run, part, its fields, and the first recall of the first paper with its row.
    ("cub:hyp-dino,released", "encoder", [], 0.809),
    ("inshop:hyp-vit", "head", ["objective.c=1"], 0.892),
    ("inshop:hyp-vit", "head", ["train.batch_size=500", "train.total_steps=9"], 0.927),
    ("sop:sph-vit", "encoder", ["objective.temperature=0.1"], 0.853),
    ("cub:hier-dino", "head", ["train.total_steps=9"], 0.811),
    ("sop:irt-l-resnet50", "encoder", [], 0.798),
    ("cub", "head", ["model.weights=/a/vit_small_patch16_224.dino.safetensors"], 0.783),
]
# Runs, and fields that set them apart from every row.
NONE = {
    "cub:hyp-dino": "eval.rerank=True | eval.expansion=5 | eval.pca.encoder=128",
    "glyphs": "",
    "sop:hyp-dino,unlabelled": "",
    "cub:mix-vit": "objective.ball_weight=8 | objective.sphere_temperature=0.1",
    "cub:hier-dino": "model.head_dim=128 | objective.hier_weight=1 | train.sampling=epoch_classes",
    "cub:irt-r": "objective.margin=0.3 | objective.memory=0.5 | data.flip=0 | model.drop_path=0",
    "cub": """objective.c=0.3 | data.image_size=192 | data.test_view=squash | eval.scales=1,0.5 |
        model.weights=hf-hub:someone/vit_small_patch16_224.dino | model.weights=None |
        data.name=folder data.path=birds""",
    "cars:hyp-dino-patch8": "model.architecture=vit_small_patch16_224",
    "sfm:irt-r-deit-s": "train.tuples.pool=2000 | data.test_view=centre_crop | eval.expansion=3",
}


def test_a_recipe_has_its_row_and_other_settings_have_none():
    for spec, part, overrides, first in FIRST:
        fields = flatten(load(spec, *overrides))
        row = published._comparable_rows(fields, part, "trained", ["recall@1"])[0]
        assert published.published_rows()[row]["recall@1"] == pytest.approx(first), (spec, row)
    for spec, alternatives in NONE.items():
        for fields in alternatives.split("|"):
            assert compare(RESULTS, load(spec, *fields.split())) == "", (spec, fields)


@pytest.mark.slow
def test_every_row_belongs_to_a_command():
    rows = published.published_rows()
    runs = {(row.run, row.fields): flatten(load(row.run, *row.fields.split())) for row in rows}
    for row, scores in rows.items():
        fields = runs[row.run, row.fields]
        assert row in published._comparable_rows(fields, row.part, row.state, scores), row


def test_differences_are_in_percentage_points():
    results = {
        "untrained": {"head": {"recall@1": 0.2}, "encoder": {"recall@1": 0.7076}},
        "final": {"head": {"recall@1": 0.79}, "encoder": {"recall@1": 0.805, "recall@2": 0.876}},
    }
    assert compare(results, load("cub")).splitlines() == [
        "published (Hyp-ViT, Table 3, pretrained DINO, 384-d): R@1 70.8 (ours +0.0)",
        "published (Hyp-ViT, Table 2, Hyp-DINO, 128-d): R@1 78.3 (ours +0.7)",
        "published (HypMix, Table 1, Hyp-DINO, 128-d): R@1 78.3 (ours +0.7)",
        "published (Hyp-ViT, Table 3, Hyp-DINO, 384-d): R@1 80.9 (ours -0.4), R@2 87.6 (ours +0.0)",
        "published (HypMix, Table 2, Hyp-DINO, 384-d): R@1 80.6 (ours -0.1), R@2 88.1 (ours -0.5)",
    ]


def test_scores_with_ground_truth_and_of_ablations_have_their_rows():
    scores = {"roxford5k/medium/map": 0.35, "roxford5k/hard/map": 0.1, "rparis6k/hard/map": 0.402}
    both = dict.fromkeys(("head", "encoder"), {"recall@1": 0.5, **scores})
    lines = compare({"final": both}, load("sfm:irt-r-deit-s")).splitlines()
    assert len(lines) == len({*lines}) == 6  # Tables 3 and 7, and of λ.
    projected = {"final": {"encoder": {"recall@1": 0.84}}}
    lines = compare(projected, load("cub:irt-r", "eval.pca.encoder=128"))
    assert "(IRT, Table 2, IRT-R-DeiT pca=128, 128-d): R@1 72.6 (ours +11.4)" in lines
