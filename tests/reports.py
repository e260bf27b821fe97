"""Run folders for reports: real ones, ones by hand, a stranger's; and a reader of pages."""

import json
import shutil
from collections.abc import Collection
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from folders import label_rows, model_folder, train, write_rows

from tezo.optim.estimators.estimate import Probe, StepRecord
from tezo.runs.files import write_manifest
from tezo.runs.folder import FILES
from tezo.runs.step_log import StepLog, read_log

HOSTILE = "<script>alert(1)<\\script> $\\frac{$ & \"x\" '{{ 7*7 }}'"


def two_runs(root: Path) -> Path:
    """`root` with two real runs: "one" with one direction a step, "two" with two."""
    data, test = write_rows(root / "rows.jsonl", label_rows(16)), write_rows(root / "test.jsonl", label_rows(8, seed=1))
    dev = write_rows(root / "dev.jsonl", label_rows(8, seed=2))
    model = model_folder(root, "opt")
    named = {"data__dev": dev, "train__log_every": 2, "train__eval_every": 4}
    assert train(model, data, root / "one", "--test", test, steps=12, **named).code == 0
    more = {"method__num_directions": 2, "train__seed": 5, "train__keep_best": False}
    assert train(model, data, root / "two", "--test", test, steps=8, **named, **more).code == 0
    return root


def made(
    folder: Path, losses: list[float], kappas: list[list[float]] | None = None, summary: dict[str, Any] | None = None
) -> Path:
    """A run folder by hand."""
    folder.mkdir(parents=True)
    kappas = kappas or [[(-1.0) ** i] for i in range(len(losses))]
    directions = len(kappas[0]) if kappas else 1
    (folder / "config.yaml").write_text(f"model: m\ndata: d.jsonl\ntrain: {{steps: {len(losses)}}}\n")
    log = StepLog(
        folder / "steps.log",
        {"directions": directions, "kinds": ["two-point"], "versions": {"torch": "2"}, "device": "cpu"},
    )
    for i, (loss, values) in enumerate(zip(losses, kappas, strict=True)):
        probes = tuple(Probe(loss, loss, k) for k in values)
        log.append(StepRecord(i, loss, 0.1, probes, forward_passes=2 * len(probes) or 1))
    log.close()
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
        write_manifest(folder, FILES)
    return folder


def rewritten_log(folder: Path, splits: Collection[str] | None = None) -> StepLog:
    """The log of a run, open, written anew with its evaluations, or those of some splits alone."""
    logged = read_log(folder / "steps.log")
    (folder / "steps.log").unlink()
    log = StepLog(folder / "steps.log", logged.header)
    for record in logged.steps:
        log.append(record)
    for (split, step), metrics in logged.evaluations.items():
        if splits is None or split in splits:
            log.append_evaluation(split, step, metrics)
    return log


def hostile(home: Path, root: Path) -> Path:
    """A copy of a run with markup wherever a stranger could put it."""
    folder = Path(shutil.copytree(home / "one", root / HOSTILE))
    mark = "<img src=x onerror=alert(1)>"
    summary = json.loads((folder / "summary.json").read_text())
    summary |= {"notices": [mark], "hardware": mark, "versions": {mark: mark}}
    summary["losses"] = {"steps": mark, "rows": mark}
    summary["verdict"] = f"Better: {mark}"
    summary["phases"] = {mark: {"seconds": 1.0, "passes": 2.0}}
    for key in ("before", "after"):
        summary[key] = {mark: 0.5, **summary[key]}
    (folder / "summary.json").write_text(json.dumps(summary))
    answers = json.loads((folder / "answers.json").read_text())
    answers["outcomes"] = {mark: 3, **answers["outcomes"]}
    answers["labels"][0]["label"] = mark
    answers["shown"] = [dict.fromkeys(["row", "text", "right", "before", "after", "outcome"], mark)] * 2
    (folder / "answers.json").write_text(json.dumps(answers))
    plan = json.loads((folder / "plan.json").read_text())
    plan[0]["name"] = plan[-1]["moved"] = mark
    (folder / "plan.json").write_text(json.dumps(plan))
    log = rewritten_log(folder)
    for split, step, value in (("13", 10, 0.5), ("14", 11, 0.5), ("13", 12, 0.25)):
        log.append_evaluation(f"{mark}{split}", step, {mark: value, "loss": 1.0})
    log.close()
    write_manifest(folder, FILES)
    return folder


class Page(HTMLParser):
    """What a page has: tags, the texts of elements, and the rows of its tables."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.words, self.rows, self.attributes = [], [], [], []
        self.in_cell = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self.in_cell = True
        if tag == "data" and self.in_cell:
            self.rows[-1][-1] = float(dict(attrs)["value"])

    def handle_endtag(self, tag):
        self.in_cell = self.in_cell and tag not in ("td", "th")

    def handle_data(self, data):
        self.words.append(data)
        if self.in_cell and self.rows[-1][-1] == "":
            self.rows[-1][-1] = data

    def row(self, name):
        return next(row[1:] for row in self.rows if row and row[0] == name)

    def of(self, tag, **wanted):
        return [a for t, a in self.attributes if t == tag and all(a.get(k) == v for k, v in wanted.items())]
