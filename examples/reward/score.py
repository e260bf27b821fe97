"""A reward: the share of a story's words that are of a lexicon."""

import re

HAPPY = set(
    re.findall(
        r"\w+",
        "happy glad fun smile smiled smiling laugh laughed laughing love loved loves play played playing friend "
        "friends hug hugged kind nice good great best proud excited joy thank thanked",
    )
)


def happy(_prompt: str, completion: str, _row: dict) -> float:
    """From 0 to 1; 0 where nothing was written."""
    words = re.findall(r"[a-z']+", completion.lower())
    return sum(word in HAPPY for word in words) / max(1, len(words))
