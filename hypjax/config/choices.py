"""Names that a configuration may choose from; the rooms above hold what they stand for.

A new loss, space, dataset or metric adds its name here and its code there; a test keeps the two
equal.
"""

OBJECTIVES = ("pairwise_cross_entropy",)  # hypjax/objectives/create.py
SPACES = ("poincare", "sphere")  # hypjax/geometry/spaces.py
DATASETS = ("glyphs", "folder", "cub200", "cars196", "sop", "inshop", "omniglot")  # hypjax/data/
SAMPLINGS = ("epoch_classes", "drawn_classes", "shuffled")  # hypjax/data/plans.py
METRICS = ("recall", "precision", "mrr", "map@r", "r_precision")  # hypjax/retrieval/metrics.py
