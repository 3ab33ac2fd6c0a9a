#!/usr/bin/env bash
# torchmetrics' CLIPScore cuts the end off long captions, which then all have one score.
#
# Versions: torchmetrics 1.9.0, transformers 5.24.0, torch 2.13.0.
#
# Source: CLIPScore (Hessel et al., EMNLP 2021) is 100 max(cos, 0) of a pair
# (https://lightning.ai/docs/torchmetrics/stable/multimodal/clip_score.html). CLIP embeds a text as
# its end token, which OpenAI's tokenizer keeps when it truncates.
#
# Input: a CLIP of random weights with places for 16 tokens, and three captions of 20 words that
# share no word; three of 5 words as a control.
#
# Expected: other captions, other scores.
#
# Seen: the three long captions have one score, since tokens are cut at the end, without the end
# token, and the model then takes the start token's output, which has seen no word. A warning says
# that captions are truncated, not that they become one.
#
# Why it matters: with CLIP, captions of more than 77 tokens score alike, whatever they say. hypjax
# keeps the end token of a text that it cuts.
#
# The script exits with 0 while this is so, and with 1 once it has changed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torchmetrics==1.9.0 torch==2.13.0 transformers==5.24.0 \
  numpy==2.4.6

cat >"$work/captions.py" <<'PYTHON'
import torch
from torchmetrics.multimodal import CLIPScore
from transformers import CLIPConfig, CLIPModel

START, END, LENGTH = 98, 99, 16


class Clip(CLIPModel):
    """A model as the metric calls it: methods that return tensors."""

    def get_text_features(self, *inputs):
        return super().get_text_features(*inputs).pooler_output

    def get_image_features(self, *inputs):
        return super().get_image_features(*inputs).pooler_output


def processor(text=None, images=None, **_):
    """Words are numbers; captions of one call have one length."""
    if images is not None:
        return {"pixel_values": torch.stack(images).float()}
    ids = torch.tensor([[START, *map(int, words.split()), END] for words in text])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
sizes |= {"intermediate_size": 64}
tokens = {"vocab_size": 100, "max_position_embeddings": LENGTH, "bos_token_id": START}
config = CLIPConfig(
    text_config=sizes | tokens | {"eos_token_id": END, "pad_token_id": 0},
    vision_config=sizes | {"image_size": 16, "patch_size": 8},
    projection_dim=16,
)
torch.manual_seed(0)
model = Clip(config).eval()
for parameter in model.parameters():
    torch.nn.init.normal_(parameter, std=0.3)
images = torch.randn(1, 3, 16, 16)


def score(images, captions):
    with torch.inference_mode():
        metric = CLIPScore(model_name_or_path=lambda: (model, processor))
        metric.update(list(images), captions)
        return float(metric.score) / len(captions)


def captions(words):
    return [" ".join(str(first + i) for i in range(words)) for first in (1, 31, 61)]


long, short = ([score(images, [x]) for x in captions(n)] for n in (20, 5))
print("scores of three captions of 20 words:", *long, "of 5 words:", *short)
if max(long) - min(long) > 1e-4 or max(short) - min(short) < 0.1:
    raise SystemExit("this has changed")
PYTHON
"$work/venv/bin/python" -W ignore "$work/captions.py"
echo "as described: long captions have one score"
