"""Writes the prompts: beginnings of stories, with other names in each part.

python examples/reward/prompts.py
"""

import itertools
import json
import random
from pathlib import Path

NAMES = {
    "train": ["Tom", "Lily", "Ben", "Sue", "Max", "Mia", "Sam", "Anna", "Jack", "Lucy", "Tim", "Emma", "Leo", "Amy"],
    "dev": ["Bob", "Jane", "Nick", "Sara"],
    "test": ["Joe", "Molly", "Dan", "Kate", "Fred", "Rose"],
}
WHO = ["boy", "girl", "dog", "cat", "bird", "bear", "frog", "rabbit"]
BEGINNINGS = [
    "Once upon a time, there was a little {who} named {name}.",
    "One day, a {who} named {name} went to the park.",
    "{name} was a {who}. {name} had a big red ball.",
    "It was raining. A {who} named {name} sat at home.",
    "{name} the {who} was lost and sad.",
]
ROWS = {"train": 256, "dev": 48, "test": 128}


def main() -> None:
    """Writes train.jsonl, dev.jsonl and test.jsonl beside this file."""
    for part, names in NAMES.items():
        every = [text.format(who=who, name=name) for text, who, name in itertools.product(BEGINNINGS, WHO, names)]
        chosen = random.Random(0).sample(every, ROWS[part])
        lines = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in chosen)
        Path(__file__).with_name(f"{part}.jsonl").write_text(lines)


if __name__ == "__main__":
    main()
