from hypjax.data.ground_truth import read_ground_truth
from hypjax.geometry import Sphere
from hypjax.retrieval import mean_score, relevance_at, relevance_scores

truth = read_ground_truth("gnd_roxford5k.pkl")
# Embed truth.queries, each cut to its row of truth.boxes, and truth.gallery.
for level in ("easy", "medium", "hard"):
    relevance = relevance_at(level, truth.ground_truth)
    scores = relevance_scores(queries, gallery, relevance, metrics=["map", "mp@10"], space=Sphere())
    print(level, {name: mean_score(values) for name, values in scores.items()})
