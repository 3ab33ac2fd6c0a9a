"""Finds an encoder's arrays in a file: the entry or module that holds them, and their names."""

import re
from collections.abc import Collection, Mapping

from hypjax.errors import UserError, nearest
from hypjax.models.encoder import renamed
from hypjax.system import console

HEADS = ("dense", "norm_dense")  # Kinds of heads that have parameters.
PROXIES = "lcas"  # Name of HIER's hierarchical proxies.
# Other names of arrays, and timm's: of DINOv2, and of timm's models that pool by "avg".
_SYNONYMS = (
    (r"^register_tokens$", "reg_token"),
    (r"^blocks\.\d+\.(?=\d+\.)", "blocks."),  # Blocks in chunks.
    (r"\.mlp\.w12\.", ".mlp.fc1."),
    (r"\.mlp\.w3\.", ".mlp.fc2."),
    (r"^fc_norm\.", "norm."),
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
    'state_dict.module.backbone'. Of several encoders, the most complete one counts; of equally
    complete ones, the first average over training (EMA, teacher), or else the first; a line says
    so. `key` is the beginning of the prefix. The result also holds other names with the prefix,
    and, by hypjax's names, the head beside an encoder by a paper's authors, and HIER's proxies.
    """
    found: dict[str, dict[str, str]] = {}
    for name in names:
        parts = name.split(".")
        for i in range(len(parts)):
            prefix, rest = ".".join(parts[:i]), ".".join(parts[i:])
            if rest in expected:
                found.setdefault(prefix, {})[rest] = name
            elif (synonym := renamed(rest, _SYNONYMS)) in expected:
                found.setdefault(prefix, {}).setdefault(synonym, name)
    prefix = _choose(found, len(expected), key)
    known, start = found.get(prefix, {}), f"{prefix}." if prefix else ""
    others = {name.removeprefix(start): name for name in names if name.startswith(start)}
    if not others:
        entries = sorted({name.partition(".")[0] for name in names})
        raise UserError(f"they have no entry {key}{nearest(key, entries)}")
    taken = set(known.values())
    others = {rest: name for rest, name in others.items() if name not in taken}
    return others | _heads(names, start) | known


def _choose(found: Mapping[str, Mapping[str, str]], size: int, key: str) -> str:
    """Prefix of the encoder that counts; `key` if none has half of the names."""
    start = f"{key}." if key else ""
    counts = {x: len(known) for x, known in found.items() if f"{x}.".startswith(start)}
    largest = max(counts.values(), default=0)
    if 2 * largest < size:  # Accidental names of another model.
        return key
    prefixes = [prefix for prefix, count in counts.items() if count == largest]
    prefix = next(filter(_AVERAGED.search, prefixes), prefixes[0])
    if len(prefixes) > 1:
        others = " and ".join(x for x in prefixes if x != prefix)
        console.say(f"the weights' {prefix} is read, not {others}; FILE?key=NAME names another")
    return prefix


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
    problems = {"they lack": missing, "unlike the encoder, they contain": others}
    listed = [f"{problem} {_listed(names)}" for problem, names in problems.items() if names]
    if listed:
        rule = "the weights belong to another model, or have other names than timm's"
        raise UserError(f"{'; '.join(listed)}: {rule}")


def _listed(names: Collection[str]) -> str:
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(sorted(names)[:_MAX_LISTED]) + more
