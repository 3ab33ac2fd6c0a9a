#!/usr/bin/env bash
# With SigLIP, sentence-transformers' embedding of a text depends on the texts beside it in its batch.
#
# Versions: sentence-transformers 6.2.0, transformers 5.24.0, torch 2.13.0.
#
# Source: SigLIP (Zhai et al., ICCV 2023) was trained on texts that are padded to 64 tokens, without
# a mask, and embeds a text as its last token, which is a padding token. Transformers' page says to
# pass `padding="max_length"` (https://huggingface.co/docs/transformers/model_doc/siglip).
# sentence-transformers pads to the longest text of a batch.
#
# Input: a SigLIP of random weights with places for 16 tokens, and a text of two words, encoded
# alone, beside another of two words, and beside a text of ten.
#
# Expected: one embedding, up to rounding.
#
# Seen: beside the text of ten words it is another embedding, and none is that of the padding to 16
# tokens, with which the model was trained.
#
# Why it matters: texts that search photographs find others after a change of the batch size, and
# all are worse than the model could be. hypjax pads SigLIP's texts to the full context.
#
# The script exits with 0 while this is so, and with 1 once it has changed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet sentence-transformers==6.2.0 transformers==5.24.0 \
  torch==2.13.0 numpy==2.4.6 pillow==13.0.0
"$work/venv/bin/pip" install --quiet --no-deps torchvision==0.28.0

cat >"$work/batches.py" <<'PYTHON'
import sys
import types

# torchvision's operations are compiled for another build of torch; they are not used here.
sys.modules["torchvision._meta_registrations"] = types.ModuleType("unused")
import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import SiglipConfig, SiglipModel, SiglipProcessor
from transformers import PreTrainedTokenizerFast, SiglipImageProcessor

WORDS = [f"w{i}" for i in range(20)]
LENGTH = 16
vocabulary = {word: i for i, word in enumerate(["</s>", "<unk>", *WORDS])}
splitter = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
splitter.pre_tokenizer = pre_tokenizers.Whitespace()
splitter.post_processor = processors.TemplateProcessing(
    single="$A </s>", special_tokens=[("</s>", 0)]
)
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=splitter,
    eos_token="</s>",
    pad_token="</s>",
    unk_token="<unk>",
    model_max_length=LENGTH,
    model_input_names=["input_ids"],
)
sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
sizes |= {"intermediate_size": 64}
tokens = {"vocab_size": len(vocabulary), "max_position_embeddings": LENGTH}
tokens |= {"eos_token_id": 0, "pad_token_id": 0, "bos_token_id": 0}
config = SiglipConfig(
    text_config=sizes | tokens, vision_config=sizes | {"image_size": 16, "patch_size": 8}
)
torch.manual_seed(0)
model = SiglipModel(config).eval()
for parameter in model.parameters():
    torch.nn.init.normal_(parameter, std=0.2)
model.save_pretrained(sys.argv[1])
size = {"height": 16, "width": 16}
SiglipProcessor(SiglipImageProcessor(size=size), tokenizer).save_pretrained(sys.argv[1])

encoder = SentenceTransformer(sys.argv[1])
text = "w1 w2"
alone, beside_short, beside_long = (
    encoder.encode([text, *others])[0] for others in ([], ["w3 w4"], [" ".join(WORDS[:10])])
)
ids = tokenizer([text], padding="max_length", return_tensors="pt")["input_ids"]
with torch.inference_mode():
    trained = model.get_text_features(ids).pooler_output[0].numpy()


def cosine(x, y):
    return float(x @ y / np.linalg.norm(x) / np.linalg.norm(y))


seen = [cosine(alone, x) for x in (beside_short, beside_long, trained)]
print("cosine of a text alone to itself beside a short text, a long one, and padded as in training:")
print(*seen)
if seen[0] < 0.99999 or max(seen[1:]) > 0.999:
    raise SystemExit("this has changed")
PYTHON
HF_HUB_OFFLINE=1 "$work/venv/bin/python" -W ignore "$work/batches.py" "$work/siglip"
echo "as described: a text's embedding depends on its batch"
