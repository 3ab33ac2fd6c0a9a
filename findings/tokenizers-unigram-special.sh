#!/usr/bin/env bash
# `encode_special_tokens` of tokenizers does not make a special token ordinary text in Unigram.
#
# Version: tokenizers 0.23.3.
#
# Source: `Tokenizer.encode_special_tokens` is documented as "Modifies the tokenizer in order to use
# or not the special tokens during encoding" (https://huggingface.co/docs/tokenizers/api/tokenizer).
#
# Input: the text "a</s>b", for a BPE vocabulary of bytes and for a Unigram vocabulary, in each of
# which "</s>" is a special token; with the property False (the default) and True.
#
# Expected: if True, the text's "</s>" is split like any other text, and the special token's number
# is not among the tokens.
#
# Seen: so it is for BPE. For Unigram, the piece "</s>" is found in the vocabulary itself, and the
# text gets the token of an end, whatever the property says.
#
# Why it matters: SigLIP's tokenizers are of this kind, and pool the last token. A caption in which
# a user writes "</s>" gets an end in its middle, where SentencePiece would split it.
#
# The script exits with 0 while this is so, and with 1 once it has changed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet tokenizers==0.23.3

cat >"$work/encode.py" <<'PYTHON'
import tokenizers
from tokenizers import models

letters = ["a", "b", "<", "/", "s", ">"]
bpe = models.BPE(vocab={x: i for i, x in enumerate([*letters, "</s>"])}, merges=[])
unigram = models.Unigram([(x, -1.0) for x in letters] + [("</s>", 0.0)], unk_id=0)
changed = []
for name, model in (("BPE", bpe), ("Unigram", unigram)):
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.add_special_tokens(["</s>"])
    end = tokenizer.token_to_id("</s>")
    for as_text in (False, True):
        tokenizer.encode_special_tokens = as_text
        tokens = tokenizer.encode("a</s>b").tokens
        print(f"{name}, encode_special_tokens={as_text}: {tokens}")
        is_special = end in tokenizer.encode("a</s>b").ids
        if is_special != (not as_text or name == "Unigram"):
            changed.append(f"{name}, {as_text}")
if changed:
    raise SystemExit(f"this has changed: {changed}")
PYTHON
"$work/venv/bin/python" "$work/encode.py"
echo "as described: Unigram finds the special token in ordinary text"
