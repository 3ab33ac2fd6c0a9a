"""Tokens of texts compared with open_clip's tokenizer, another one, and Transformers' padding."""

import pathlib
import random

import numpy as np
import pytest

from hypjax.models.tokens import MERGES, open_tokenizer
from hypjax.settings import TextSettings

open_clip = pytest.importorskip("open_clip", reason="needs the parity extra: open_clip_torch")
instant = pytest.importorskip("instant_clip_tokenizer", reason="needs the parity extra")
torch = pytest.importorskip("torch", reason="needs the parity extra: torch")
transformers = pytest.importorskip("transformers", reason="needs the parity extra: transformers")

THINGS = "dog,Granny Smith,Mont Blanc,café,T-shirt,Šárka,O'Neill,smørrebrød,iPhone 15,B-52".split(
    ","
)
PLACES = (
    "Zürich,the zoo,a street in São Paulo,Kraków,room 101,北京,東京駅,Москве,القاهرة,서울".split(
        ","
    )
)
TAILS = [
    "",
    "!!",
    " … and it’s 3:45pm, isn't it?",
    " &amp;amp; friends &lt;3",
    "\t(© 2023)\n\nno. 1,234,567.89  ",
    " 🐶🐕‍🦺 #dogs @zoo_7",
    " ½ kg ﬁsh, naïve “quotes” — don't, we've, they're, I'll, he'd, I'M",
    " schÃ¶n",  # UTF-8 that was read as Latin-1.
    " https://a.b/c?d=e&f=g",
    " हिन्दी ไทย עברית",
]
LONG = "an extraordinarily long sentence about incomprehensibilities, number {}, that never ends "


def captions(count):
    """Captions from general to specific, with names, numbers, scripts and damage of web pages."""
    rng = random.Random(0)
    for index in range(count):
        thing, place, tail = rng.choice(THINGS), rng.choice(PLACES), rng.choice(TAILS)
        number = rng.randrange(10 ** rng.randrange(1, 9))
        yield rng.choice(
            [
                thing,
                f"{thing} in {place}{tail}",
                f"A photo of {number} {thing}s,\u3000near {place}{tail}",
                f"{tail}{thing.upper()}{number}x{index}",
                "".join(chr(rng.randrange(0x20, 0x2FF)) for _ in range(rng.randrange(40))),
                LONG.format(number) * rng.randrange(8),
            ]
        )


@pytest.fixture(scope="module")
def tokenizer():
    file = pathlib.Path(open_clip.__file__).with_name(MERGES)
    return open_tokenizer(file, TextSettings(width=512, depth=12, num_heads=8))


def test_tokens_of_two_thousand_texts(tokenizer):
    texts = list(captions(2000))
    ours, cut = tokenizer.tokenize(texts)
    assert cut.sum() > 100 and (ours[cut, -1] == tokenizer.end).all()
    np.testing.assert_array_equal(ours, open_clip.tokenizer.SimpleTokenizer()(texts).numpy())
    clean = [tokenizer.clean(text) for text in texts]  # The other one only puts to lower case.
    np.testing.assert_array_equal(ours, instant.Tokenizer().tokenize_batch(clean))


def test_transformers_padding_gives_the_same_embedding(tokenizer):
    config = transformers.CLIPTextConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    config.eos_token_id = tokenizer.end
    torch.manual_seed(0)
    model = transformers.CLIPTextModel(config).eval()
    ids = tokenizer(["", "a dog", *captions(6)])
    ends = np.where(np.cumsum(ids == tokenizer.end, axis=1) > 0, tokenizer.end, ids)
    assert (ends != ids).any()
    with torch.no_grad():
        ours, theirs = (model(torch.tensor(x, dtype=torch.long)).pooler_output for x in (ids, ends))
    np.testing.assert_allclose(ours, theirs, atol=1e-6)
