"""Rows that are in two splits, and rows that are shown before themselves: by what a model reads, and nothing else."""

import random
from functools import partial

import pytest
from folders import completion_rows, label_rows, message_rows, model_folder, tezo, words_tokenizer, write_rows
from task_folders import form_of, rows_of

from tezo.tasks.examples import Row
from tezo.tasks.formats import choose_format
from tezo.tasks.notices import label_notices, leak_notices
from tezo.tasks.rewards import prompt_of
from tezo.tasks.row_files import DataConfig
from tezo.tasks.setup import render_chat
from tezo.tasks.wordings import Demonstrated

CHAT = words_tokenizer(chat=True)
PAIRS = [(row["prompt"], row["completion"].strip()) for row in completion_rows(24)]
SHAPES = {
    "label": label_rows(24),
    "completion": completion_rows(24),
    "messages": message_rows(24),
    "sharegpt": [
        {"conversations": [{"from": "human", "value": asked}, {"from": "gpt", "value": said}]} for asked, said in PAIRS
    ],
    "instruction": [{"instruction": asked, "input": "", "output": said} for asked, said in PAIRS],
    "text": [{"text": f"{asked} {said}"} for asked, said in PAIRS],
}
UNREAD = ["id", "idx", "Unnamed: 0", "", "source", "date"]


def numbered(rows: list[dict], name: str) -> list[Row]:
    return [Row(row, f"{name}, row {n}") for n, row in enumerate(rows, start=1)]


def format_of(rows: list[dict]):
    return choose_format(numbered(rows, "rows"), "causal", DataConfig(), partial(render_chat, CHAT))


def with_others(rows: list[dict], draw: random.Random) -> list[dict]:
    """The same rows with other columns that are not read, in another order."""
    names = draw.sample(UNREAD, draw.randint(0, len(UNREAD)))
    found = []
    for row in rows:
        wider = [*row.items(), *((name, draw.choice([draw.random(), str(draw.random())])) for name in names)]
        draw.shuffle(wider)
        found.append(dict(wider))
    return found


def leaks(form, train: list[dict], dev: list[dict], test: list[dict]) -> list[str]:
    parts = [numbered(part, name) for part, name in ((train, "train"), (dev, "dev"), (test, "test"))]
    return leak_notices(*([form.example(row) for row in part] for part in parts))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(4))
def test_columns_that_are_not_read_change_no_count_of_leaked_rows(shape, seed):
    draw, rows = random.Random(seed), SHAPES[shape]
    train, dev, test = rows[:12], [*rows[3:9], *rows[12:16]], [*rows[8:10], *rows[15:24]]
    form = format_of(rows)
    plain = leaks(form, train, dev, test)
    assert plain[0].startswith("2 of the 11 test rows are dev rows too"), "rows 8 and 15"
    assert plain[1].startswith("8 of the 21 dev and test rows are training rows too"), "six of dev, two of test"
    assert leaks(form, *(with_others(part, draw) for part in (train, dev, test))) == plain
    assert leaks(form, rows[:8], rows[8:16], rows[16:]) == []


@pytest.mark.parametrize(
    "change", [str.upper, " {} ".format, lambda text: text.replace(" ", " \t "), "\u200b{}".format]
)
def test_white_space_and_case_do_not_hide_a_row(change):
    changed = [row | {"text": change(row["text"])} for row in SHAPES["label"]]
    (notice,) = leaks(format_of(SHAPES["label"]), SHAPES["label"][:12], changed[:5], changed[12:])
    assert notice.startswith("5 of the 17 dev and test rows are training rows too")
    rows = numbered([SHAPES["label"][0], changed[0] | {"label": "bad"}, *SHAPES["label"][1:]], "rows")
    form = format_of(SHAPES["label"])
    (notice,) = label_notices([form.example(row) for row in rows], form.labels)
    assert notice.startswith("2 training rows have the text of another and not its label")


def test_a_row_with_another_answer_is_another_row_unless_a_reward_reads_prompts_alone():
    rows = SHAPES["completion"]
    other = [row | {"completion": " another"} for row in rows]
    form = format_of(rows)
    assert leaks(form, rows[:12], other[:12], rows[12:]) == []
    prompts = [[prompt_of(form, row) for row in numbered(part, "x")] for part in (rows[:12], other[:6], rows[12:])]
    (notice,) = leak_notices(*prompts)
    assert notice.startswith("6 of the 18 dev and test rows are training rows too")


@pytest.mark.parametrize("shape", ["label", "completion", "instruction"])
@pytest.mark.parametrize("seed", range(3))
def test_a_row_is_never_shown_before_itself(shape, seed):
    draw, rows = random.Random(seed), SHAPES[shape]
    form = format_of(rows)
    pool = numbered(with_others(rows, draw), "train")
    shown = Demonstrated(form, pool, 23, seed)
    for row, own in zip(rows, numbered(with_others(rows, draw), "dev"), strict=True):
        *before, asked = shown.example(own).prompt.split("\n\n" if shape != "instruction" else "\n\nBelow")
        assert len(before) == 23 and asked.endswith(form.example(Row(row, "x")).prompt.removeprefix("Below"))
        assert not any(form.example(Row(row, "x")).prompt.removeprefix("Below").strip() in text for text in before)


def test_a_task_shows_no_row_before_itself_whatever_its_number():
    fields = rows_of("sst2", 8)
    inner = form_of("sst2", "causal")
    pool = [Row(row | {"idx": n}, f"train, row {n}") for n, row in enumerate(fields)]
    form = Demonstrated(inner, pool, 7, seed=0)
    for n, row in enumerate(fields):
        *shown, asked = form.example(Row(row | {"idx": 100 + n}, f"dev, row {n}")).prompt.split("\n\n")
        assert asked == inner.example(pool[n]).prompt and not any(text.startswith(asked) for text in shown)


def test_a_run_says_that_rows_are_leaked_beside_a_column_of_ids(tmp_path):
    model, rows = model_folder(tmp_path, "opt"), label_rows(24)
    for name, start, own in (("train", 0, rows[:16]), ("dev", 500, [*rows[:7], rows[20]])):
        write_rows(tmp_path / f"{name}.csv", [{"": start + n, **row} for n, row in enumerate(own)])
    done = tezo(
        "train",
        "--model",
        model,
        "--data",
        tmp_path / "train.csv",
        "--set",
        f"data.dev={tmp_path}/dev.csv",
        "--dry-run",
    )
    assert done.code == 0, done.err
    assert "7 of the 8 dev and test rows are training rows too" in done.out
