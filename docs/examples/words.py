import csv
import pathlib
import sys

import numpy as np
import torch

from hypjax.data.sentences import sentence_encoder


def unit(x):
    return x / np.linalg.norm(x, axis=1, keepdims=True)


features, classes, model, weights, root = sys.argv[1:]
photos, encode = np.load(features), sentence_encoder(f"onnx:{model}").features
products = list(csv.reader(open(f"{root}/classes.csv")))[1:]  # Name, number, coarse class, ...
coarse = {}  # By department; the first half of each, rounded up, is trained on.
for row in products:
    coarse.setdefault(row[4].split("/")[2], {})[row[2]] = None
known = {x for names in coarse.values() for x in [*names][: -(-len(names) // 2)]}
is_train = np.array([row[2] in known for row in products])
files = [pathlib.Path(root + row[5]) for row in products]
described = [" ".join(file.read_text("utf-8-sig", "replace").split()) for file in files]
named = [row[0].replace("-", " ") for row in products]
texts = unit(encode(described) + encode(named))

number = {row[0]: i for i, row in enumerate(products)}
labels = np.array([number[name] for name in photos["labels"]])
x, trained = photos["features"].astype(np.float32), is_train[labels]

# The photograph's words: texts of the ten likeliest of ImageNet's classes, by their probabilities.
state = torch.load(weights, map_location="cpu", weights_only=True)
logits = (x @ state["_fc.weight"].numpy().T + state["_fc.bias"].numpy()) / 2
p = np.exp(logits - logits.max(1, keepdims=True))
p[p < np.sort(p, 1)[:, [-10]]] = 0
words = unit((p / p.sum(1, keepdims=True)) @ encode(pathlib.Path(classes).read_text().splitlines()))
words, texts = unit(words - words[trained].mean(0)), unit(texts - texts[is_train].mean(0))

# Ridge regression of training products' texts on their mean photographs' principal components.
mean, covariance = x[trained].mean(0), np.cov(x[trained].T)
variances, vectors = (array[..., -256:] for array in np.linalg.eigh(covariance))
z = unit((x - mean) @ vectors / variances**0.25)
means = np.stack([z[labels == i].mean(0) for i in np.flatnonzero(is_train)])
gram = means @ means.T + np.eye(len(means))
learned = unit(z @ (means.T @ np.linalg.solve(gram, texts[is_train])))


def show(name, images):
    unseen = np.flatnonzero(~is_train)
    cosines = texts[unseen] @ images[~trained].T
    own = labels[~trained] == unseen[:, None]
    order = np.argsort(-cosines, 1)
    hits = np.take_along_axis(own, order, 1)
    count, rank = hits.cumsum(1), np.arange(1, hits.shape[1] + 1)
    before = np.where(rank > 1, (count - 1) / np.maximum(rank - 1, 1), 1)
    ap = (hits * (before + count / rank) / 2).sum(1) / hits.sum(1)
    right = (cosines * own).sum(0)
    above = (cosines > np.where(own, cosines, 0).sum(0)).sum(0)
    reciprocal = np.where(above == 0, 1, 0.5 / (1 + above))
    by_photo = [(above == 0), (above < 5), reciprocal]
    by_product = [np.array([y[row].mean() for row in own]) for y in by_photo]
    drawn = np.random.default_rng(0).integers(0, len(unseen), (4000, len(unseen)))
    for score in (hits[:, 0], hits[:, :5].any(1), ap, *by_product):
        low, high = np.quantile(score[drawn].mean(1), [0.025, 0.975])
        name += f" | {score.mean():.3f} ({low:.3f} to {high:.3f})"
    print(name)


show("words of the encoder's classes", words)
show("ridge regression on 45 products", learned)
show("both", unit(words + learned))
