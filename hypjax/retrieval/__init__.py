"""Exact nearest-neighbour search and evaluation of embeddings in any space."""

from hypjax.retrieval.metrics import average_precision as average_precision
from hypjax.retrieval.metrics import bootstrap_interval as bootstrap_interval
from hypjax.retrieval.metrics import mean_average_precision_at_r as mean_average_precision_at_r
from hypjax.retrieval.metrics import mean_score as mean_score
from hypjax.retrieval.metrics import query_scores as query_scores
from hypjax.retrieval.metrics import r_precision as r_precision
from hypjax.retrieval.metrics import recall_at_k as recall_at_k
from hypjax.retrieval.metrics import relevance_scores as relevance_scores
from hypjax.retrieval.neighbors import nearest_among as nearest_among
from hypjax.retrieval.neighbors import nearest_neighbors as nearest_neighbors
from hypjax.retrieval.projection import prefix_points as prefix_points
from hypjax.retrieval.ranks import NO_MATCH as NO_MATCH
from hypjax.retrieval.ranks import match_ranks as match_ranks
from hypjax.retrieval.relevance import LEVELS as LEVELS
from hypjax.retrieval.relevance import Relevance as Relevance
from hypjax.retrieval.relevance import relevance_at as relevance_at
from hypjax.types import Judgements as Judgements
