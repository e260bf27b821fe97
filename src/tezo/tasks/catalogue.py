"""The sixteen data sets of the paper, with the prompts of MeZO, LOZO, SubZO and TeZO.

To add one, add an entry here, a row to `examples.json` and its prompt to `tests/golden/`; the tests cover all entries.
"""

import json
from collections.abc import Sequence
from importlib import resources

from tezo.models.kinds import Kind
from tezo.system.errors import RequestError, nearest
from tezo.tasks.examples import Row, drop, squad
from tezo.tasks.rows import Format
from tezo.tasks.wordings import MASK, Choice, FreeText, Hub, OwnOptions, Task, Text, index_of

SUPER_GLUE, GLUE = "aps/super_glue", "nyu-mll/glue"


def capital(text: str) -> str:
    """Returns the text with an upper-case first letter."""
    return text[:1].upper() + text[1:]


def small(text: str) -> str:
    """Returns the text with a lower-case first letter."""
    return text[:1].lower() + text[1:]


def filled(template: str) -> Text:
    """Returns the prompt with the fields of a row in the place of their names in braces."""
    return template.format_map


def pair(first: str, second: str, words: tuple[str, ...]) -> Choice:
    """Makes RoBERTa's prompt for two sentences: "first?<mask>, second", without the last character of the first."""
    return Choice(lambda row: f"{row[first][:-1]}?{MASK}, {small(row[second])}", words)


def premise_and_hypothesis(words: tuple[str, ...]) -> dict[Kind, Format]:
    """Words natural language inference, for masked models and encoders."""
    described = {" Yes": "It follows.", " No": "It is false.", " Maybe": "It may be true or false."}
    both = Choice(filled("{premise} {hypothesis}"), tuple(described[word] for word in words))
    return {"masked": pair("premise", "hypothesis", words), "encoder": both}


def sentiment(text: str, words: tuple[str, ...]) -> dict[Kind, Format]:
    """Words sentiment, for masked models and encoders; `words` go from negative to positive."""
    return {
        "masked": Choice(lambda row: f"{row[text].strip()} It was{MASK}.", words),
        "encoder": Choice(lambda row: row[text], tuple(f"It was{word}." for word in words)),
    }


def _copa(row: Row) -> str:
    joints = {"effect": " so", "cause": " because"}
    if row["question"] not in joints:
        raise RequestError(f"{row.where}: question is {row['question']!r}; it must be cause or effect.")
    return row["premise"].removesuffix(".") + joints[row["question"]]


def _copa_options(row: Row) -> list[str]:
    choices = [row["choice1"].split(" "), row["choice2"].split(" ")]
    return [" " + " ".join([first if first == "I" else first.lower(), *rest]) for first, *rest in choices]


def _record_right(row: Row) -> list[int]:
    entities = row.value("entities", list)
    right = [entities.index(answer) for answer in row.value("answers", list) if answer in entities]
    if not right:
        raise RequestError(f"{row.where}: none of its answers is among its entities; fix or remove that row.")
    return right


def _texts(row: Row, field: str, key: str) -> Sequence[str]:
    """Returns the distinct answers; `RequestError` if there are none."""
    texts = row.value(field, dict).get(key)
    if not isinstance(texts, list) or not texts:
        raise RequestError(f"{row.where}: there is no answer in {field!r}; fix or remove that row.")
    return [str(text) for text in dict.fromkeys(texts)]


YES_NO, NO_YES = ("Yes", "No"), ("No", "Yes")
TERRIBLE_GREAT = (" terrible", " great")
ENTAILMENT = (" Yes", " Maybe", " No")

CAUSAL = (
    Task("sst2", Hub("stanfordnlp/sst2"), {
        "causal": Choice(lambda row: f"{row['sentence'].strip()} It was", TERRIBLE_GREAT),
        **sentiment("sentence", TERRIBLE_GREAT),
    }),
    Task("rte", Hub(SUPER_GLUE, "rte"), {
        "causal": Choice(filled('{premise}\nDoes this mean that "{hypothesis}" is true? Yes or No?\n'), YES_NO),
        **premise_and_hypothesis((" Yes", " No")),
    }),
    Task("cb", Hub(SUPER_GLUE, "cb"), {
        "causal": Choice(
            filled('Suppose {premise} Can we infer that "{hypothesis}"? Yes, No, or Maybe?\n'), ("Yes", "No", "Maybe")
        ),
    }, num_dev=100),
    Task("boolq", Hub(SUPER_GLUE, "boolq"), {
        "causal": Choice(lambda row: f"{row['passage']} {capital(row['question'].removesuffix('?'))}?\n", NO_YES),
    }),
    Task("wsc", Hub(SUPER_GLUE, "wsc.fixed"), {
        "causal": Choice(
            lambda row: f'{row["text"]}\nIn the previous sentence, does the pronoun "{row["span2_text"].lower()}" '
                        f"refer to {row['span1_text']}? Yes or No?\n",
            NO_YES,
        ),
    }),
    Task("wic", Hub(SUPER_GLUE, "wic"), {
        "causal": Choice(
            filled('Does the word "{word}" have the same meaning in these two sentences? Yes, No?\n'
                   "{sentence1}\n{sentence2}\n"),
            NO_YES,
        ),
    }),
    Task("multirc", Hub(SUPER_GLUE, "multirc"), {
        "causal": Choice(
            filled("{paragraph}\nQuestion: {question}\n"
                   'I found this answer "{answer}". Is that correct? Yes or No?\n'),
            NO_YES,
        ),
    }),
    Task("copa", Hub(SUPER_GLUE, "copa"), {
        "causal": OwnOptions(_copa, _copa_options, lambda row: [index_of(row, "label", 2)], kept=("question",)),
    }, num_dev=100),
    Task("record", Hub(SUPER_GLUE, "record"), {
        "causal": OwnOptions(
            lambda row: row["passage"].replace("@highlight\n", "- ") + "\n-",
            lambda row: [" " + row["query"].replace("@placeholder", name) for name in row.value("entities", list)],
            _record_right,
            lambda row: row.value("entities", list),
        ),
    }, measures=(squad,)),
    Task("squad", Hub("rajpurkar/squad"), {
        "causal": FreeText(
            filled("Title: {title}\nContext: {context}\nQuestion: {question}\nAnswer:"),
            lambda row: _texts(row, "answers", "text"),
        ),
    }, metric="f1", measures=(squad,)),
    Task("drop", Hub("ucinlp/drop"), {
        "causal": FreeText(
            filled("Passage: {passage}\nQuestion: {question}\nAnswer:"),
            lambda row: _texts(row, "answers_spans", "spans"),
        ),
    }, metric="f1", measures=(squad, drop)),
)  # fmt: skip
"""Tasks of the paper's tables for OPT and LLaMA."""

MASKED = (
    Task("sst5", Hub("SetFit/sst5"),
         sentiment("text", (" terrible", " bad", " okay", " good", " great"))),
    Task("snli", Hub("stanfordnlp/snli"), premise_and_hypothesis(ENTAILMENT),
         unlabelled=-1),
    Task("mnli", Hub(GLUE, "mnli", test="validation_matched"),
         premise_and_hypothesis(ENTAILMENT)),
    Task("qnli", Hub(GLUE, "qnli"),
         {"masked": pair("question", "sentence", (" Yes", " No"))}),
    Task(
        "trec", Hub("CogComp/trec", test="test"),
        {
            "masked": Choice(filled(f"{MASK}: {{text}}"), (
                " Expression", " Entity", " Description", " Human", " Location", " Number"), "coarse_label"),
            "encoder": Choice(filled("{text}"), (
                "What does the abbreviation mean?", "What thing is it?", "How is it described?", "Who is it?",
                "Where is it?", "How many are there?"), "coarse_label"),
        },
    ),
)  # fmt: skip
"""Tasks of the paper's tables for RoBERTa-large, besides SST-2 and RTE."""

TASKS = {task.name: task for task in (*CAUSAL, *MASKED)}


def task(name: str) -> Task:
    """Returns the task `name`; `RequestError` if there is none."""
    if name not in TASKS:
        raise RequestError(f"data.task: there is no task {name!r}. " + nearest(name, TASKS))
    return TASKS[name]


def example_row(name: str) -> Row:
    """Returns an example row of the task `name`, written for this project."""
    rows = json.loads((resources.files("tezo.tasks") / "examples.json").read_text(encoding="utf-8"))
    return Row(rows[name], "the example")
