"""Writes the questions: other people and other numbers in each part.

python examples/agent/questions.py
"""

import json
import random
from pathlib import Path

NAMES = {
    "train": ["Tom", "Lily", "Ben", "Sue", "Max", "Mia", "Sam", "Anna", "Jack", "Lucy", "Tim", "Emma", "Leo", "Amy"],
    "dev": ["Bob", "Jane", "Nick", "Sara"],
    "test": ["Joe", "Molly", "Dan", "Kate", "Fred", "Rose"],
}
THINGS = ["nuts", "books", "stamps", "apples", "coins", "shells", "cards", "pens"]
FORMS = {
    "+": [
        "{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?",
        "There are {a} {things} in a box and {b} in a bag. How many {things} are there?",
    ],
    "-": [
        "{name} has {a} {things} and gives away {b}. How many {things} are left?",
        "There were {a} {things} in a box, and {name} took {b} of them. How many {things} are in the box now?",
    ],
    "*": [
        "{name} has {b} boxes with {a} {things} in each. How many {things} does {name} have?",
        "{name} buys {a} {things} on each of {b} days. How many {things} does {name} buy?",
    ],
}
ROWS = {"train": 192, "dev": 48, "test": 96}


def row(draw: random.Random, names: list[str]) -> dict:
    """Returns a question with its answer, and the first prompt of the agent."""
    operation = draw.choice([*FORMS])
    a, b = draw.randint(21, 99), draw.randint(3, 9) if operation == "*" else draw.randint(11, 20)
    text = draw.choice(FORMS[operation]).format(name=draw.choice(names), things=draw.choice(THINGS), a=a, b=b)
    answer = {"+": a + b, "-": a - b, "*": a * b}[operation]
    return {"messages": [{"role": "user", "content": text}], "question": text, "answer": answer}


def main() -> None:
    """Writes train.jsonl, dev.jsonl and test.jsonl beside this file; no question is there twice."""
    seen: set[str] = set()
    for part, names in NAMES.items():
        draw, rows = random.Random(part), []
        while len(rows) < ROWS[part]:
            new = row(draw, names)
            if new["question"] not in seen:
                seen.add(new["question"])
                rows.append(new)
        Path(__file__).with_name(f"{part}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))


if __name__ == "__main__":
    main()
