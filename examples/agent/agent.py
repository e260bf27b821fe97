"""An agent of two calls with a calculator. It knows nothing of the model but where it answers and its name there.

OPENAI_BASE_URL=http://127.0.0.1:8000/v1 TEZO_MODEL=NAME python examples/agent/agent.py "Tom has 3 bags of 14 nuts. How
many nuts does he have?"
"""

import json
import os
import re
import sys
import urllib.request
from dataclasses import dataclass

SHOWN = (
    ("Ann has 24 eggs and 3 plates. How many things does Ann have?", "24 + 3"),
    ("Calculator: 27. Answer the question.", "27 things."),
)
TELL = "Calculator: {}. Answer the question."
OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
CALCULATION = re.compile(r"(\d{1,6}) *([-+*]) *(\d{1,6})")


@dataclass(frozen=True)
class Answer:
    """Returns the result of the calculator, None where it was asked nothing, and the last words."""

    result: int | None
    text: str


def chat(messages: list[dict[str, str]], most: int) -> str:
    """Returns the model's answer to a conversation."""
    body = {
        "model": os.environ["TEZO_MODEL"],
        "messages": messages,
        "max_tokens": most,
        "temperature": 0,
        "stop": ["\n"],
    }
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY', 'none')}"},
    )
    with urllib.request.urlopen(request) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


def calculator(text: str) -> int | None:
    """The tool: returns the result of the first calculation in a text; None where there is none."""
    found = CALCULATION.search(text)
    return OPERATIONS[found[2]](int(found[1]), int(found[3])) if found else None


def solve(question: str) -> Answer:
    """Asks for a calculation, has the calculator do it, and asks for the answer."""
    messages = [
        {"role": role, "content": text}
        for pair in SHOWN
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    messages.append({"role": "user", "content": question})
    calculation = chat(messages, 12)
    result = calculator(calculation)
    if result is None:
        return Answer(None, calculation)
    messages += [
        {"role": "assistant", "content": calculation},
        {"role": "user", "content": TELL.format(result)},
    ]
    return Answer(result, chat(messages, 12))


def score(row: dict) -> float:
    """1 for the right number in the last sentence; a part for a calculation, and for the right one."""
    found = solve(row["question"])
    numbers = re.findall(r"\d+", found.text)
    is_right = found.result is not None and bool(numbers) and int(numbers[-1]) == row["answer"]
    return 1.0 if is_right else 0.1 * (found.result is not None) + 0.3 * (found.result == row["answer"])


def solved(row: dict) -> float:
    """Whether the last sentence has the right number."""
    return float(score(row) == 1.0)


if __name__ == "__main__":
    print(solve(sys.argv[1]))
