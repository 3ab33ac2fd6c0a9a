"""Finds an encoder's arrays in a file: the entry or module that holds them, and their names."""

import collections
import re
from collections.abc import Collection, Sequence

from hypjax.errors import UserError, nearest
from hypjax.models.encoder import renamed
from hypjax.system import console

HEADS = ("dense", "norm_dense")  # Kinds of heads that have parameters.
PROXIES = "lcas"  # Name of HIER's hierarchical proxies.
# DINOv2's names of arrays, and timm's.
_SYNONYMS = (
    (r"^register_tokens$", "reg_token"),
    (r"^blocks\.\d+\.(?=\d+\.)", "blocks."),  # Blocks in chunks.
    (r"\.mlp\.w12\.", ".mlp.fc1."),
    (r"\.mlp\.w3\.", ".mlp.fc2."),
)
OPTIMISER = re.compile(  # Modules of averages of gradients, with the names of the weights.
    r"(^|\.)(\w*optim\w*|opt_state\w*|(max_)?exp_(avg|inf)\w*|momentum_buffers?|square_avg|grads?)\."
)
_AVERAGED = re.compile(r"(?:^|[._])(?:ema|teacher)(?:[._]|$)")  # Averages over training.
# Heads beside `body` in files of Hyp-ViT, HypMix and HIER, and their kinds.
_RELEASED_HEADS = {"head.0": "dense", "head_linear": "dense", "last_layer.1": "norm_dense"}
# Arrays that no encoder needs: heads, decoders of pretraining, counts of updates, mask tokens.
_IGNORED = re.compile(
    r"(head|head_dist|fc|classifier|pre_logits|projection_head|projector|predictor|prototypes)\..*"
    r"|decoder_.*|mask_token|masked_embed|n_averaged|.*\.num_batches_tracked"
    rf"|({'|'.join(HEADS)})\..*|{PROXIES}"
)
_MAX_LISTED = 3  # Names in a message.


def find_encoder(
    names: Collection[str], expected: Collection[str], key: str = ""
) -> dict[str, str]:
    """Finds an encoder's arrays among all names in a file; returns their names by timm's.

    Entries and modules that contain an encoder are a common prefix of its names, such as
    'state_dict.module.backbone.'. Of several encoders, the most complete one counts; of equally
    complete ones, the first average over training (EMA, teacher), or else the first; a line says
    so. `key` is the beginning of the prefix; optimisers are passed over unless it names one. The
    result also holds other names with the prefix, and, by hypjax's names, the head beside an
    encoder by a paper's authors, and HIER's proxies.
    """
    start = f"{key}." if key else ""
    if not OPTIMISER.search(start):
        names = [name for name in names if not OPTIMISER.search(name)]
    inside = [name for name in names if name.startswith(start)]
    if key and not inside:
        entries = sorted({name.partition(".")[0] for name in names})
        raise UserError(f"they have no entry {key}{nearest(key, entries)}")
    # Names in the file by timm's, by prefix.
    encoders: dict[str, dict[str, str]] = collections.defaultdict(dict)
    for name in inside:
        for dot in (-1, *(match.start() for match in re.finditer(r"\.", name))):
            prefix, rest = name[: dot + 1], name[dot + 1 :]
            if (timm_name := renamed(rest, _SYNONYMS)) in expected and prefix.startswith(start):
                encoders[prefix][timm_name] = name
    largest = max(map(len, encoders.values()), default=0)
    if 2 * largest >= len(expected):  # Fewer are accidental names of another model.
        prefixes = [prefix for prefix, known in encoders.items() if len(known) == largest]
        start = preferred(prefixes, "; FILE?key=NAME names another")
    known = encoders[start]
    others = [x for x in inside if x.startswith(start) and x not in known.values()]
    return {x.removeprefix(start): x for x in others} | _heads(names, start) | known


def preferred(prefixes: Sequence[str], remedy: str = "") -> str:
    """The prefix of the first average over training, or else the first; a line says so."""
    start = next(filter(_AVERAGED.search, prefixes), prefixes[0])
    if len(prefixes) > 1:
        passed_over = " and ".join(x[:-1] or "the rest" for x in prefixes if x != start)
        console.say(f"the weights' {start[:-1] or 'top'} is read, not {passed_over}{remedy}")
    return start


def _heads(names: Collection[str], start: str) -> dict[str, str]:
    """Names of a released head, which lies beside the encoder `body`, and of HIER's proxies."""
    heads = {leaf: name for name in names if (leaf := name.rpartition(".")[2]) == PROXIES}
    outer, body, _ = start.partition("body.")
    for released, kind in _RELEASED_HEADS.items():
        for leaf in ("weight", "bias"):
            if body and (name := f"{outer}{released}.{leaf}") in names:
                heads[f"{kind}.{leaf}"] = name
    return heads


def check_names(missing: Collection[str], others: Collection[str]) -> None:
    """Raises a `UserError` for names that are missing, or that the encoder does not have."""
    others = [name for name in others if not _IGNORED.fullmatch(name)]
    if "fc_norm.weight" in others:
        flags = "model.pool_first=True --config.model.pooling=avg --config.model.eval_pooling=avg"
        raise UserError(f"they normalise the average of tokens (fc_norm); set --config.{flags}")
    listed = []
    for problem, names in (("they lack", missing), ("unlike the encoder, they contain", others)):
        more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
        if names:
            listed.append(f"{problem} {', '.join(sorted(names)[:_MAX_LISTED])}{more}")
    if listed:
        rule = "the weights belong to another model, or have other names than timm's"
        raise UserError(f"{'; '.join(listed)}: {rule}")
