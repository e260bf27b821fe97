"""Which examples are used: k of each class, or some held out for a dev set. Pure functions of the seed."""

from collections.abc import Sequence

from tezo.errors import RequestError
from tezo.random import permutation
from tezo.tasks.base import Example


def per_class(examples: Sequence[Example], count: int, labels: Sequence[str], seed: int) -> list[Example]:
    """`count` examples of every label, drawn by `seed`, in the order of the file."""
    chosen: list[int] = []
    for index, label in enumerate(labels):
        own = [i for i, example in enumerate(examples) if example.label == index]
        if len(own) < count:
            raise RequestError(f"data.per_class is {count}, but label {label!r} has {len(own)} rows; lower it.")
        order = permutation(len(own), seed=seed, step=0, name=f"per_class.{label}")
        chosen += [own[i] for i in order[:count]]
    return [examples[i] for i in sorted(chosen)]


def hold_out(examples: Sequence[Example], share: float, seed: int) -> tuple[list[Example], list[Example]]:
    """(kept, held out): a random `share` of the examples, at least one and at most 500, for a dev set."""
    count = min(500, max(1, round(share * len(examples))))
    if count >= len(examples):
        raise RequestError(
            f"data.train has {len(examples)} row(s), too few to hold some out; give data.dev or data.test."
        )
    held = set(permutation(len(examples), seed=seed, step=0, name="hold_out")[:count])
    kept = [example for i, example in enumerate(examples) if i not in held]
    return kept, [example for i, example in enumerate(examples) if i in held]
