#!/usr/bin/env bash
# mteb's zero-shot tasks of images and texts score by cosine or by the model's similarity, by the
# order in which a task names its modalities.
#
# Versions: mteb 2.26.24, torch 2.13.0.
#
# Source: a model of mteb defines `similarity` of two collections of embeddings
# (`EncoderProtocol`), which tasks of retrieval call. Of mteb's zero-shot tasks of images, 14 state
# their modalities as ["image", "text"], and 10 as ["text", "image"].
#
# Input: 20 images, 10 black and 10 white, and the texts "black" and "white". A model embeds them in
# the Poincaré ball: black at 0.2 from the origin, white at 0.8, about in one direction. Its
# similarity is minus the distance in the ball.
#
# Expected: an accuracy of 1, in either order.
#
# Seen: 1 by ["text", "image"], 0.5 by ["image", "text"]: there the evaluator takes cosines, by
# which both texts are equally near, and never calls the model's similarity.
#
# Why it matters: models that compare points by distances are scored by angles in one part of a
# benchmark. `python -m hypjax.zero_shot` compares in the model's space.
#
# The script exits with 0 while this is so, and with 1 once it has changed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet mteb==2.26.24 torch==2.13.0 numpy==2.4.6 pillow==13.0.0
# mteb's tasks of images want torchvision to be there; this task does not use it.
"$work/venv/bin/pip" install --quiet --no-deps torchvision==0.28.0

cat >"$work/order.py" <<'PYTHON'
import sys
import types

# torchvision's operations are compiled for another build of torch; they are not used here.
sys.modules["torchvision._meta_registrations"] = types.ModuleType("unused")
import datasets
import mteb
import numpy as np
from mteb.abstasks.task_metadata import TaskMetadata
from mteb.abstasks.zeroshot_classification import AbsTaskZeroShotClassification
from mteb.models.model_meta import ModelMeta
from PIL import Image

CLASSES = ("black", "white")
RADII = np.array([0.2, 0.8], np.float32)


class Ball:
    """Points of the Poincaré ball, the two classes of which lie in about one direction."""

    mteb_model_meta = ModelMeta.create_empty(
        {"name": "none/ball", "revision": "1", "modalities": ["image", "text"]}
    )
    calls = 0

    def encode(self, inputs, **options):
        points = []
        for batch in inputs:
            if "image" in batch:
                pixels = np.array([np.asarray(image)[0, 0, 0] for image in batch["image"]])
                points += [(RADII[int(x > 127)], 0.02 * (x % 2) - 0.01) for x in pixels]
            else:
                points += [(RADII[CLASSES.index(text)], 0) for text in batch["text"]]
        return np.array(points, np.float32)

    def similarity(self, embeddings1, embeddings2):
        Ball.calls += 1
        x, y = np.asarray(embeddings1)[:, None], np.asarray(embeddings2)[None]
        gaps = (1 - (x**2).sum(-1)) * (1 - (y**2).sum(-1))
        return -np.arccosh(1 + 2 * ((x - y) ** 2).sum(-1) / gaps)

    def similarity_pairwise(self, embeddings1, embeddings2):
        return np.diag(self.similarity(embeddings1, embeddings2))


def task(modalities):
    class Shades(AbsTaskZeroShotClassification):
        metadata = TaskMetadata(
            name="Shades",
            dataset={"path": "none/shades", "revision": "1"},
            description="Black and white images.",
            type="ZeroShotClassification",
            category="i2t",
            modalities=modalities,
            eval_splits=["test"],
            eval_langs=["eng-Latn"],
            main_score="accuracy",
        )
        input_column_name = "image"
        label_column_name = "label"

        def load_data(self, **options):
            levels = [*range(10), *range(246, 256)]
            images = [Image.new("RGB", (8, 8), (x, x, x)) for x in levels]
            columns = {"image": images, "label": [int(x > 127) for x in levels]}
            rows = datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())
            self.dataset, self.data_loaded = {"default": {"test": rows}}, True

        def get_candidate_labels(self):
            return list(CLASSES)

    return Shades()


seen = {}
for modalities in (["text", "image"], ["image", "text"]):
    Ball.calls = 0
    result = mteb.evaluate(Ball(), task(modalities), cache=None, show_progress_bar=False)
    seen[modalities[0]] = result.task_results[0].get_score(), Ball.calls
    print(f"{modalities}: accuracy {seen[modalities[0]][0]}, {Ball.calls} calls of similarity")
if seen != {"text": (1, 1), "image": (0.5, 0)}:
    raise SystemExit("this has changed")
PYTHON
HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 "$work/venv/bin/python" -W ignore "$work/order.py"
echo "as described: the order of the modalities chooses the similarity"
