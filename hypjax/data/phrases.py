"""More general texts that follow from a caption: its sentences, noun phrases and their nouns.

Rules of our own, without a model, after the idea of Hyper3-CLIP's caption hierarchy (ECCV 2026
workshop, arXiv 2608.29313). They are for English. A phrase ends at punctuation, at prepositions,
conjunctions, pronouns and common verbs, and at most words in -ing or -ly; "of" joins ("a glass of
milk").
"""

import re
from collections.abc import Iterator

MAX_PHRASES = 12  # Of a caption: later phrases of long captions describe details.
_LONGEST = 6  # Words of a phrase; more are a clause whose verb is not listed.

_ARTICLES = frozenset(("a", "an", "the"))
_LEADING = _ARTICLES | frozenset(  # Determiners, which no phrase begins or ends with.
    "of this that these those some any each every all both another other its his her their our my "
    "your one two three four five six several many few various very rather quite more most much "
    "less enough".split()
)
# What follows these words does not follow from the caption.
_NEGATIONS = frozenset("no not without nor neither never or like free".split())
_BOUNDARIES = _NEGATIONS | frozenset(
    "about above across after against along amid among around as at atop before behind below "
    "beneath beside besides between beyond by down during for from in inside into like near next "
    "off on onto opposite out outside over past per than through to toward towards under "
    "underneath until up upon via with within without and or but nor so because if then though "
    "although when where while which who whom whose what that it they them he him she we you i "
    "there here not no also too only just often usually well both either "
    "is are was were be been being am has have had having can may might will would could should "
    "must do does did done sits sit sat stands stand stood holds hold held lies lie lay lays "
    "hangs hang hung rides ride rode walks walk runs run ran eats eat ate looks look wears wear "
    "wore plays play flies fly flew shows show shown makes make made takes take took gets get "
    "got goes go went comes come came gives give gave uses use used contains contain eaten tells "
    "leans want wants store keep lined covered decorated "
    "filled parked placed topped surrounded attached suits suit fits fit tastes originates "
    "reminds varies vary grows grow grown known called".split()
)
# Nouns and adjectives in -ing and -ly, which end no phrase.
_NOUNS = frozenset(
    "building ceiling clothing wedding pudding dressing filling frosting icing evening morning "
    "king ring string wing thing something anything nothing spring sling swing painting railing "
    "awning lighting living dining baking topping serving seasoning swimming parking "
    "family butterfly dragonfly fly belly jelly lily curly lovely friendly".split()
)
_ABSTRACT = frozenset(
    "front back top bottom side middle center centre background foreground left right end kind "
    "type sort variety lot couple group number piece bunch pair set way time use".split()
)
_SENTENCES = re.compile(r"(?<=[.!?;])\s+")
_WORDS = re.compile(r"\d+(?:[.,]\d+)+|[^\W_]+(?:['’\-][^\W_]+)*|[^\w\s]")


def parents(caption: str) -> tuple[str, ...]:
    """Lists texts that are more general than a caption, each once, in lower case.

    First come its sentences, if it has several; then its noun phrases, without determiners, in
    their order; last the nouns that end phrases of several words.
    """
    sentences = [_trimmed(text) for text in _SENTENCES.split(caption.strip())]
    phrases = [phrase for text in sentences for phrase in _phrases(text)][:MAX_PHRASES]
    nouns = [noun for phrase in phrases if (noun := _noun(phrase)) not in _ABSTRACT]
    listed = [*(sentences if len(sentences) > 1 else ()), *map(" ".join, phrases), *nouns]
    return tuple(text for text in dict.fromkeys(listed) if text and text != _trimmed(caption))


def _trimmed(text: str) -> str:
    return text.strip(" .!?;").lower()


def _phrases(sentence: str) -> Iterator[list[str]]:
    """Noun phrases of a sentence, as words, that hold of what has this sentence."""
    phrase: list[str] = []
    is_negated = False
    for word in [*_WORDS.findall(sentence), "."]:
        begins = word in _ARTICLES and phrase and phrase[-1] != "of"
        if not begins and not _ends_phrase(word):
            phrase.append(word)
            continue
        # What comes before an article is a verb: "dog chases | a ball".
        phrase = _stripped(phrase[:-1] if begins else phrase)
        if phrase and not is_negated and word != "or":
            yield phrase
        is_negated = word in _NEGATIONS or (is_negated and not phrase and word[0].isalnum())
        phrase = []


def _stripped(words: list[str]) -> list[str]:
    """A phrase without determiners at its ends; nothing if that leaves no noun phrase."""
    phrase = [*words]
    while phrase and (phrase[0] in _LEADING or phrase[1:2] == ["of"] and phrase[0] in _ABSTRACT):
        phrase.pop(0)
    while phrase and phrase[-1] in _LEADING:
        phrase.pop()
    is_abstract = len(phrase) == 1 and phrase[0] in _ABSTRACT
    return [] if is_abstract or len(phrase) > _LONGEST else phrase


def _ends_phrase(word: str) -> bool:
    is_participle_or_adverb = word.endswith(("ing", "ly")) and word not in _NOUNS
    return not word[0].isalnum() or word in _BOUNDARIES or is_participle_or_adverb


def _noun(phrase: list[str]) -> str:
    """The noun of a phrase: its last word, or the last one before "of"."""
    head = phrase[: phrase.index("of")] if "of" in phrase else phrase
    return head[-1]
