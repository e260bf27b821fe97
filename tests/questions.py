"""Examples of every kind, and each family's model with the objective that scores them."""

import torch
from folders import completion_rows, label_rows, tiny_model, tokenizer_for
from torch import Tensor

from tezo.models.loading import LoadedModel
from tezo.tasks.examples import Example
from tezo.tasks.objectives import objective_for

CPU = torch.device("cpu")
OPTIONS = (" good", " bad", " not so good", " very quite bad film")


def labelled(options=OPTIONS, count: int = 7) -> list[Example]:
    rows = label_rows(count, seed=3)
    return [
        Example(f"{row['text']}\nLabel:", options[i % len(options)], options, i % len(options), f"line {i}")
        for i, row in enumerate(rows)
    ]


def free_text(count: int = 5) -> list[Example]:
    return [Example(row["prompt"], row["completion"], (), None, "a line") for row in completion_rows(count, seed=3)]


def slotted(text: str, options=(" good", " bad"), label: int = 0, where: str = "a line") -> Example:
    """The example of a prompt with {mask} in it."""
    before, after = text.split("{mask}")
    return Example(before + after, options[label], options, label, where, slot=len(before))


def masked_texts(count: int = 6) -> list[str]:
    return [f"{row['text']} It was {{mask}}." for row in label_rows(count, seed=3)]


def masked_examples() -> list[Example]:
    options = (" good", " bad", " fresh")
    return [slotted(text, options, i % 3, f"line {i}") for i, text in enumerate(masked_texts())]


def case(family: str):
    """(model, objective, examples) of a family."""
    tokenizer = tokenizer_for(family)
    model = tiny_model(family, len(tokenizer))
    examples = masked_examples() if family == "roberta" else labelled()
    if family == "bert":
        examples = [Example(e.prompt, e.answer, e.options, e.label, e.where) for e in examples]
    kind = {"roberta": "masked", "bert": "encoder"}.get(family, "causal")
    return model, objective_for(LoadedModel(model, tokenizer, kind), examples[0].options), examples


def scores_of(model, objective, encoded) -> Tensor:
    """The scores of the options of these examples, in one batch: (examples, options)."""
    return objective.evaluator.option_scores(model, objective.collate(encoded))[0]


def loss_of(model, objective, encoded) -> Tensor:
    """The mean loss of these examples, in one batch."""
    return objective.closure(model, [objective.collate(encoded)])()
