"""Metrics of answers: by the conventions of the ZO papers, and by those of the data sets."""

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

Score = tuple[float, float]
"""(exact match, F1), each from 0 to 1."""

Measure = Callable[[str, Sequence[str]], dict[str, float]]
"""(answer, correct answers) -> metrics by name, each from 0 to 1."""


def squad(prediction: str, references: Sequence[str]) -> dict[str, float]:
    """SQuAD's "exact_match" and "f1", each the best over the references."""
    exact, f1 = exact_and_f1(prediction, references)
    return {"exact_match": exact, "f1": f1}


def drop(prediction: str, references: Sequence[str]) -> dict[str, float]:
    """DROP's official "drop_exact_match" and "drop_f1"; the references are the spans of one answer."""
    exact, f1 = drop_exact_and_f1(prediction, references)
    return {"drop_exact_match": exact, "drop_f1": f1}


def normalized(text: str) -> str:
    """The text in SQuAD's normal form: lower case, without punctuation, articles and repeated spaces."""
    kept = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def exact_and_f1(prediction: str, references: Sequence[str]) -> Score:
    """(equality after normalisation, F1 of the common words), each the best over the references."""
    scores = [(float(normalized(prediction) == normalized(r)), _word_f1(prediction, r)) for r in references]
    return max(exact for exact, _ in scores), max(f1 for _, f1 in scores)


def _word_f1(prediction: str, reference: str) -> float:
    said, right = normalized(prediction).split(), normalized(reference).split()
    common = sum((Counter(said) & Counter(right)).values())
    if common == 0:
        return 0.0
    return 2 * common / (len(said) + len(right))


def drop_exact_and_f1(prediction: str, spans: Sequence[str]) -> Score:
    """DROP's official metric for an answer of one span; `spans` together are the correct answer.

    Words are compared after normalisation, numbers by value. A span with numbers scores 0 unless the answer has one of
    them. F1 is that of the best span, divided by the number of spans.
    """
    said = _drop_words(prediction)
    right = [_drop_words(span) for span in spans]
    exact = float(len(right) == 1 and said == right[0])
    return exact, round(max(_bag_f1(said, bag) for bag in right) / len(right), 2)


def _drop_words(text: str) -> frozenset[str]:
    """The set of a span's words: numbers written as floats, words in lower case without articles and punctuation."""
    words = (_drop_word(word) for word in re.split(r"[ -]", text))
    return frozenset(part for word in words for part in word.split())


def _drop_word(word: str) -> str:
    lower = word.lower()
    bare = lower if _number(lower) is not None else "".join(c for c in lower if c not in string.punctuation)
    value = _number(bare)
    return str(value) if value is not None else re.sub(r"\b(a|an|the)\b", " ", bare)


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _bag_f1(said: frozenset[str], right: frozenset[str]) -> float:
    numbers = {word for word in right if _number(word) is not None}
    if numbers and not numbers & said:
        return 0.0
    common = len(said & right)
    precision = common / len(said) if said else 1.0
    recall = common / len(right) if right else 1.0
    return 2 * precision * recall / (precision + recall) if common or not (said or right) else 0.0
