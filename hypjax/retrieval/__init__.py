"""Exact nearest-neighbour search and evaluation of embeddings in any space.

The order of results is the order of separations: functions of the distance that increase with it,
computed by subtraction in float64, so that nearby points lose no digits. Since subtracting all
pairs is slow, searches run in three stages:

1. **Certified scores** (`scores`). One matrix product gives each pair a score: −separation plus a
   slack that exceeds all rounding errors. So −separation is at most the score, and at least the
   score less twice the slack.
2. **Selection** by these bounds leaves few items open. For neighbours, the items with the highest
   scores are candidates (`selection`). For the rank of a query's nearest match, two thresholds
   count the items that surely, and that may, precede it (`ranks`, over `tiles` of the matrix). For
   the ranks of all positives, bounds in float64 order all but near-ties (`positives`).
3. **Subtraction** (`subtraction`) orders the open items: candidates and near-ties.

The bounds also certify an answer: the k-th neighbour is surely nearer than any item that is no
candidate, or both counts agree. For other queries, `subtraction.certify` searches in float64.
"""

from hypjax.retrieval.graded import graded_scores as graded_scores
from hypjax.retrieval.metrics import average_precision as average_precision
from hypjax.retrieval.metrics import bootstrap_intervals as bootstrap_intervals
from hypjax.retrieval.metrics import mean_average_precision_at_r as mean_average_precision_at_r
from hypjax.retrieval.metrics import mean_score as mean_score
from hypjax.retrieval.metrics import query_scores as query_scores
from hypjax.retrieval.metrics import r_precision as r_precision
from hypjax.retrieval.metrics import recall_at_k as recall_at_k
from hypjax.retrieval.metrics import relevance_scores as relevance_scores
from hypjax.retrieval.neighbors import nearest_neighbors as nearest_neighbors
from hypjax.retrieval.positives import LEVELS as LEVELS
from hypjax.retrieval.positives import Relevance as Relevance
from hypjax.retrieval.positives import relevance_at as relevance_at
from hypjax.types import GroundTruth as GroundTruth
