"""The page about runs: its numbers are those of the files, and whatever they hold is text."""

import json
import math
import random
import shutil
import struct
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
from folders import completion_rows, label_rows, model_folder, refused, tezo, train, write_rows
from reports import HOSTILE, Page, hostile, made, rewritten_log, two_runs

from tezo.report import charts, page
from tezo.report import curves as numbers
from tezo.report import page as result_block
from tezo.report.tables import MISSING, row_loss, step_loss
from tezo.runs.files import write_manifest
from tezo.runs.folder import FILES
from tezo.runs.reader import OUTCOMES, read_run
from tezo.runs.resuming import in_folder
from tezo.runs.step_log import MAGIC, StepLog, read_log
from tezo.runs.words import OPTIONS_LOSS, TEXT_LOSS, change_text, metric_text, work_of, work_text


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return two_runs(tmp_path_factory.mktemp("home"))


@pytest.fixture
def run(home, tmp_path):
    """A copy of a run that a test may damage."""
    return Path(shutil.copytree(home / "one", tmp_path / "run"))


def reported(tmp_path, *runs):
    output = tmp_path / "report.html"
    done = tezo("report", *runs, "--output", output)
    assert (done.code, done.out.strip()) == (0, str(output)), done.err
    return Page(output.read_text(encoding="utf-8"))


def test_every_figure_of_the_page_is_that_of_the_files(home, tmp_path):
    shown = reported(tmp_path, home / "one")
    summary = json.loads((home / "one" / "summary.json").read_text())
    for name, before in summary["before"].items():
        after = summary["after"][name]
        assert shown.row(name) == pytest.approx([before, after, after - before])
    values = {attributes["value"] for attributes in shown.of("data")}
    passes, seconds = work_of(summary)
    for figure in (round(passes), seconds, *(summary[key] for key in ("peak_memory", "seconds_stepping", "kept_step"))):
        assert str(figure) in values, figure
    kappas = [p.projected_grad for step in read_log(home / "one" / "steps.log").steps for p in step.probes]
    rms = math.sqrt(sum(k * k for k in kappas) / len(kappas))
    assert shown.row("rms") == pytest.approx([rms])
    assert shown.row("mean") == pytest.approx([sum(kappas) / len(kappas)])
    assert shown.row("method.rank") == ["4"]
    plan = json.loads((home / "one" / "plan.json").read_text())
    trained = [row for row in plan if row["trained"]]
    table = [row for row in shown.rows if len(row) == 7 and row[-1] in {row["moved"] for row in trained}]
    assert sum(row[2] for row in table) == len(trained)
    assert sum(row[5] for row in table) == summary["parameters"]["trained"]
    assert {row[4] for row in table} == {4}
    words = "".join(shown.words)
    assert all(text in words for text in (*summary["versions"].values(), summary["hardware"], *summary["notices"]))
    assert f"tezo train {home / 'one' / 'config.yaml'} --output {home / 'one-again'}" in words
    assert "half-life 1 steps" in words


def test_the_curves_pass_through_the_files_numbers(home):
    run = read_run(home / "two")
    ((kind, axes),) = charts.loss_charts([run]).items()
    passes, steps, seconds = axes.values()
    assert [*axes] == ["forward passes", "steps", "seconds"] and kind == OPTIONS_LOSS
    read = [step.loss for step in read_log(home / "two" / "steps.log").steps]
    lines = [json.loads(line) for line in (home / "two" / "metrics.jsonl").read_text().splitlines()]
    dev = [(line["step"], line["loss"]) for line in lines if line.get("split") == "dev"]
    half = 0.5 ** (1 / numbers.half_life(8))
    smoothed = [
        sum(half**i * loss for i, loss in enumerate(read[n::-1])) / sum(half**i for i in range(n + 1)) for n in range(8)
    ]
    # the first step takes two passes more
    for chart, unit, more in ((steps, 1, 0), (passes, 4, 2)):
        shown = {one.style: one.points for one in chart.series}
        assert shown["dots"] == [(unit * (n + 1) + more, loss) for n, loss in enumerate(read)]
        assert shown["line"] == [(unit * (n + 1) + more, pytest.approx(mean)) for n, mean in enumerate(smoothed)]
        assert shown["dev"] == [(unit * step + more * (step > 0), loss) for step, loss in dev]
        ends = f"two, smoothed: {read[0]:.4g} at {unit + more}, {smoothed[-1]:.4g} at {8 * unit + more}."
        assert ends in chart.description and "half-life 1 steps" in chart.caption
    assert "seconds spent on steps" in seconds.x
    assert [x for x, _ in seconds.series[0].points] == pytest.approx(list(numbers.seconds_at(run).values()))


def test_two_runs_lie_over_each_other_and_are_compared(home, tmp_path):
    shown = reported(tmp_path, home / "one", home / "two")
    first, second = (json.loads((home / name / "summary.json").read_text()) for name in ("one", "two"))
    assert shown.row("loss after") == [first["after"]["loss"], second["after"]["loss"]]
    summaries = [json.loads((home / name / "summary.json").read_text()) for name in ("one", "two")]
    assert shown.row("forward passes") == [round(work_of(summary)[0]) for summary in summaries]
    assert shown.row("method.num_directions") == ["1", "2"]
    assert shown.row("train.seed") == ["0", "5"]
    runs = [read_run(home / name) for name in ("one", "two")]
    for chart in (
        *charts.loss_charts(runs)[OPTIONS_LOSS].values(),
        *charts.metric_charts(runs),
        charts.kappa_histogram(runs),
    ):
        first, second = ([one.style for one in chart.series if one.colour == i] for i in (0, 1))
        assert first == second and chart.legend == {"one": 0, "two": 1}
    drawn = shown.of("svg", role="img")
    # loss; accuracy, macro F1 and calibration error; histogram; of each run how sure it is, and kappa
    assert len(drawn) == 3 + 3 + 1 + 2 + 2
    assert all(svg["aria-label"] and svg["viewbox"].startswith("0 0 ") for svg in drawn)


def test_a_run_opens_with_its_result_in_the_words_of_the_command_line(home, tmp_path):
    data, test = home / "rows.jsonl", home / "test.jsonl"
    for name, kind, flags in (("a", "test rows", ("--test", test)), ("b", "dev rows, which also chose the step", ())):
        run = tmp_path / name
        done = train(home / "opt", data, run, *flags)
        summary = json.loads((run / "summary.json").read_text())
        rows = f"{summary['rows']['test'] or summary['rows']['dev']} {kind}"
        block = text_of(tmp_path, run).partition("Loss: ")[0]
        said = " ".join(done.out.split())
        assert rows in block and rows in said
        assert work_text(summary) in block and work_text(summary) in said
        assert (result_block.CHOSEN_ON in block) == (not flags)
        verdict = in_folder(summary["verdict"], run)
        found, _, why = verdict.partition(": ")
        assert verdict in said and why[1:] in block and found.lower() in block
        for name in ("accuracy", "loss"):
            before, after = summary["before"][name], summary["after"][name]
            texts = [metric_text(name, before), metric_text(name, after), change_text(name, before, after)]
            assert f"{name} before {texts[0]} \N{RIGHTWARDS ARROW} after {texts[1]} {texts[2]}" in block
            assert "".join(f"{name}{''.join(texts)}".split()) in "".join(done.out.replace("\u2502", "").split())


def text_of(tmp_path, *runs):
    """The text of a page."""
    return " ".join(" ".join(reported(tmp_path, *runs).words).split())


def test_the_chart_of_the_losses_has_a_choice_of_axes_without_script_or_ids(home, tmp_path):
    shown = reported(tmp_path, home / "one")
    axes = shown.of("input")
    assert [axis["aria-label"] for axis in axes] == ["forward passes", "steps", "seconds"]
    assert {(axis["type"], axis["name"]) for axis in axes} == {("radio", "axis-1")}
    assert ["checked" in axis for axis in axes] == [True, False, False]
    titles = [svg["aria-label"].partition(":")[0] for svg in shown.of("svg", role="img")]
    assert titles[:3] == ["Loss over forward passes", "Loss over steps", "Loss over seconds"]


def test_losses_of_other_kinds_have_charts_of_their_own(home, tmp_path):
    texts = write_rows(tmp_path / "texts.jsonl", completion_rows(12))
    assert train(home / "opt", texts, tmp_path / "texts", steps=4).code == 0
    named = {"train__objective": "accuracy", "method__name": "mezo", "method__rank": None}
    assert train(home / "opt", home / "rows.jsonl", tmp_path / "metric", steps=4, **named).code == 0
    runs = [read_run(folder) for folder in (home / "one", tmp_path / "texts", tmp_path / "metric")]
    found = charts.loss_charts(runs)
    assert {kind: [*axes["steps"].legend] for kind, axes in found.items()} == {
        OPTIONS_LOSS: ["one", "metric"], TEXT_LOSS: ["texts"], "minus accuracy": ["metric"],
    }  # fmt: skip
    styles = {(kind, one.run, one.style) for kind, axes in found.items() for one in axes["steps"].series if one.points}
    assert {style for kind, run, style in styles if (kind, run) == (OPTIONS_LOSS, "metric")} == {"dev", "kept"}
    assert {style for kind, _, style in styles if kind == "minus accuracy"} == {"dots", "line"}
    words = text_of(tmp_path, home / "one", tmp_path / "texts", tmp_path / "metric")
    assert "These losses are of 3 kinds, which cannot be compared" in words
    assert all(f"Loss: {kind}" in words for kind in found)
    for run in runs:  # and of a run that has not ended, they are told by its metrics and its objective
        unfinished = replace(run, summary=None)
        assert (step_loss(unfinished), row_loss(unfinished)) == (step_loss(run), row_loss(run))


def test_the_dev_curve_begins_before_the_first_step_and_marks_the_step_that_was_kept(home, tmp_path):
    assert train(home / "opt", home / "rows.jsonl", tmp_path / "run", steps=8, train__eval_every=2).code == 0
    run = read_run(tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["loss"] for line in lines if line.get("split") == "dev"}
    losses[0] = next(line["loss"] for line in lines if line.get("split") == "test" and line["step"] == 0)
    series = {one.style: one.points for one in charts.loss_charts([run])[OPTIONS_LOSS]["steps"].series}
    assert series["dev"] == sorted(losses.items())
    kept = json.loads((tmp_path / "run/summary.json").read_text())["kept_step"]
    assert series["kept"] == [(kept, losses[kept])]


def test_answers_by_label_have_the_recall_and_precision_of_their_counts(home, tmp_path):
    shown = reported(tmp_path, home / "one")
    labels = json.loads((home / "one/answers.json").read_text())["labels"]
    assert len(labels) > 1

    def share(part, whole):
        return f"{100 * part / whole:.0f} %" if whole else "\N{EN DASH}"

    for entry in labels:
        before, after, rows = entry["before"], entry["after"], entry["rows"]
        pairs = [
            (before["right"], after["right"]),
            (share(before["right"], rows), share(after["right"], rows)),
            (share(before["right"], before["answered"]), share(after["right"], after["answered"])),
        ]
        texts = [f"{start} \N{RIGHTWARDS ARROW} {end}" for start, end in pairs]
        assert [" ".join(str(cell).split()) for cell in shown.row(entry["label"])[1:]] == texts
        assert shown.row(entry["label"])[0] == rows
    assert shown.row("all labels")[0] == sum(entry["rows"] for entry in labels)


def test_answers_are_shown_before_and_after_with_their_rows(home, tmp_path):
    words = text_of(tmp_path, home / "one")
    found = json.loads((home / "one/answers.json").read_text())
    for row in found["shown"]:
        was, now = (mark for mark in next(key for key, text in OUTCOMES.items() if text == row["outcome"]))
        marks = ["\u2713" if right else "\u2717" for right in (was, now)]
        told = f"{row['right']} before {row['before']} {marks[0]} after {row['after']} {marks[1]}"
        assert " ".join(f"{row['row']} \u00b7 {row['outcome']} {row['text']} right answer {told}".split()) in words
    assert all(f"{number} {outcome}" in words for outcome, number in found["outcomes"].items())


def test_rounds_are_shown_as_they_were_measured(tmp_path):
    data = write_rows(tmp_path / "rows.jsonl", label_rows(40))
    model = model_folder(tmp_path, "llama")
    own = {"method__rank": None, "method__lr": None, "train__batch_size": None, "train__guard": False}
    done = train(model, data, tmp_path / "run", steps=3, method__name="gauss-newton", **own)
    assert done.code == 0, done.err
    shown = reported(tmp_path, tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    rounds = [line for line in lines if "round" in line]
    dev = {line["step"]: line["loss"] for line in lines if line.get("split") == "dev"}
    assert [line["step"] for line in rounds] == [1, 2, 3]
    for line in rounds:
        own = line["round"]
        name, signal = max(line["signal"].items(), key=lambda found: found[1])
        expected = [own["own"], own["promised"], own["real"], own["taken"], dev[line["step"]], signal, name]
        assert shown.row(str(line["step"])) == [*map(pytest.approx, expected[:-1]), name]
        assert own["own"] == pytest.approx(line["loss"])
        assert (own["taken"] > 0) == any(line["projected_grads"])
        assert not own["taken"] or own["real"] + own["validated"] - own["promised"] < own["own"]
    assert max(own for line in rounds for own in line["signal"].values()) <= 1


def test_the_signal_of_a_layer_is_the_highest_of_its_matrices():
    signal = {"model.layers.2.up.weight": -0.1, "model.layers.0.q.weight": 0.1, "model.layers.0.up.weight": 0.3}
    assert numbers.signal_by_layer(signal | {"head.weight": 0.9}) == [(0.0, 0.3), (2.0, -0.1)]


def test_an_unfinished_run_is_shown_with_what_it_has(run, tmp_path):
    for name in ("summary.json", "manifest.json"):
        (run / name).unlink()
    with (run / "steps.log").open("ab") as file:
        file.write(b"torn")
    shown = reported(tmp_path, run)
    words = " ".join("".join(shown.words).split())
    assert "run is unfinished: it has 12 of 12 steps" in words
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    dev = [line for line in lines if line.get("split") == "dev"]
    assert shown.row("dev loss")[:2] == [dev[0]["loss"], dev[-1]["loss"]]
    once = next(line for line in lines if line.get("split") == "bias")
    assert shown.row("bias loss") == [once["loss"], MISSING, MISSING], "it was measured once"
    for name in ("metrics.jsonl", "plan.json"):
        (run / name).unlink()
    rewritten_log(run, ()).close()
    titles = [svg["aria-label"].partition(":")[0] for svg in reported(tmp_path, run).of("svg", role="img")]
    assert titles[:2] == ["Loss over forward passes", "Loss over steps"]  # no time is known
    assert len(titles) == 4  # nor an evaluation


def test_a_run_of_one_step_has_a_page_and_one_of_none_is_refused(tmp_path):
    shown = reported(tmp_path, made(tmp_path / "run", [1.5], [[0.25]]))
    assert "1 of 1 step" in " ".join("".join(shown.words).split())
    refused(tezo("report", made(tmp_path / "none", []), "--output", tmp_path / "no.html"), "no finished step")


def test_the_marks_of_a_chart_are_those_that_it_has(run, tmp_path):
    def caption():
        (run / "manifest.json").unlink(missing_ok=True)
        (run / "summary.json").unlink(missing_ok=True)
        return [chart.caption for chart in charts.metric_charts([read_run(run)])]

    assert all(text.startswith("Rings: dev rows. Squares: test rows") for text in caption())
    rewritten_log(run, ("dev",)).close()
    assert set(caption()) == {"Rings: dev rows."}


def test_a_run_by_gradient_has_no_kappas(home, tmp_path):
    made(tmp_path / "adam", [2.0, 1.0, 1.5], [[], [], []])
    shown = reported(tmp_path, tmp_path / "adam")
    assert "by gradient" in "".join(shown.words)
    assert not [svg for svg in shown.of("svg", role="img") if "rojected" in svg["aria-label"]]


def test_losses_without_scale_do_not_break_a_chart(tmp_path):
    for i, losses in enumerate(
        ([0.0] * 3, [1e308, -1e308, 1.0, 2.0], [1e149, -1e149], [1e-320, 0.0], [math.nan, 1.0, 2.0, math.inf])
    ):
        kappas = [[0.0], [1e308], *[[math.nan]] * (len(losses) - 2)]
        shown = reported(tmp_path, made(tmp_path / str(i), losses, kappas))
        drawn = [a.get(name, "") for _, a in shown.attributes for name in ("d", "x", "y", "transform")]
        assert len(drawn) > 100 and not any("nan" in text or "inf" in text for text in drawn), losses


def test_names_and_notices_with_markup_stay_text(home, tmp_path):
    shown = reported(tmp_path, hostile(home, tmp_path))
    assert not {"script", "img"} & set(shown.tags)
    assert not any(name.startswith("on") for _, attributes in shown.attributes for name in attributes)
    assert HOSTILE in "".join(shown.words)
    assert any(HOSTILE in svg["aria-label"] for svg in shown.of("svg", role="img"))
    (policy,) = shown.of("meta", **{"http-equiv": "Content-Security-Policy"})
    assert policy["content"] == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def test_the_charts_of_a_page_are_inert_and_have_no_id_in_common(home, tmp_path):
    shown = reported(tmp_path, home / "two", hostile(home, tmp_path))
    inside = {"svg", "g", "defs", "clippath", "path", "rect", "text", "use"}
    assert {tag for tag, found in shown.attributes if "transform" in found or "d" in found or "id" in found} <= inside
    assert shown.tags.count("style") == 1 and not {"metadata", "image", "a", "script", "foreignobject"} & set(
        shown.tags
    )
    ids = [found["id"] for _, found in shown.attributes if "id" in found]
    assert len(set(ids)) == len(ids) > 8
    used = {found["href"] for _, found in shown.attributes if "href" in found}
    clipped = {found["clip-path"] for _, found in shown.attributes if "clip-path" in found}
    assert used | clipped <= {f"#{name}" for name in ids} | {f"url(#{name})" for name in ids}
    again = tmp_path / "again.html"
    assert tezo("report", home / "two", tmp_path / HOSTILE, "--output", again).code == 0
    assert again.read_bytes() == (tmp_path / "report.html").read_bytes()


@pytest.mark.parametrize("name", [HOSTILE, "$\\frac{$", "\x00\x1b\udcff]]>-->", "\u4e16\u754c", "_x", "", "W" * 300])
def test_any_name_of_a_metric_can_be_drawn(name, tmp_path):
    folder = made(tmp_path / "run", [1.0, 2.0])
    log = StepLog(folder / "steps.log", {})
    for step in (1, 2):
        log.append_evaluation("dev", step, {name: 0.5})
    log.close()
    shown = reported(tmp_path, folder)
    label = f"{name} at evaluations: ".replace("\udcff", "\\udcff")
    assert any(svg["aria-label"].startswith(label) for svg in shown.of("svg", role="img"))
    assert not {"script", "img"} & set(shown.tags)


def test_runs_of_one_name_are_told_apart_by_their_paths(home, tmp_path):
    other = shutil.copytree(home / "two", tmp_path / "one")
    shown = reported(tmp_path, home / "one", other)
    assert [row[0] for row in shown.rows[1:3]] == [str(home / "one"), str(other)]


def cut(path, bytes_from_end):
    data = bytearray(path.read_bytes())
    data[-bytes_from_end] ^= 255
    path.write_bytes(data)


def header_only(path, directions):
    text = json.dumps({"directions": directions, "kinds": ["two-point"]}).encode()
    head = MAGIC + struct.pack("<I", len(text)) + text
    path.write_bytes(head + struct.pack("<I", zlib.crc32(head)))


def damaged(run, key, value):
    path = run / "answers.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))


def too_many_right(run):
    label = json.loads((run / "answers.json").read_text())["labels"][0]
    label["after"]["right"] = label["after"]["answered"] + 1
    damaged(run, "labels", [label])


ALIASES = "a0: &a0 [1, 1]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
DAMAGE = {
    "no config": (lambda run: (run / "config.yaml").unlink(), ["has lost its config.yaml"]),
    "bad config": (lambda run: (run / "config.yaml").write_text("model: [1]"), ["config.yaml", "model"]),
    "deep config": (lambda run: (run / "config.yaml").write_text("[" * 5000), ["config.yaml"]),
    "long config": (lambda run: (run / "config.yaml").write_text("#" * (5 << 20)), ["config.yaml", "more than"]),
    "config kind": (lambda run: (run / "config.yaml").write_text("[1]"), ["config.yaml is no configuration;"]),
    "config tag": (lambda run: (run / "config.yaml").write_text("a: !!timestamp x"), ["config.yaml", "YAML"]),
    "config bytes": (lambda run: (run / "config.yaml").write_bytes(b"\xff\xfe\xff"), ["config.yaml", "YAML"]),
    "nested config": (lambda run: (run / "config.yaml").write_text("a: " + "[" * 20 + "]" * 20), ["no configuration;"]),
    "aliases": (lambda run: (run / "config.yaml").write_text(ALIASES), ["config.yaml is no configuration;"]),
    "circle": (lambda run: (run / "config.yaml").write_text("a: &a [*a]"), ["config.yaml is no configuration;"]),
    "log": (lambda run: cut(run / "steps.log", 300), ["steps.log", "damaged after step 12"]),
    "no log": (lambda run: (run / "steps.log").write_bytes(b"x"), ["steps.log", "not a step log"]),
    "no steps": (lambda run: header_only(run / "steps.log", 1), ["steps.log has no finished step", "--resume"]),
    "metrics": (lambda run: (run / "metrics.jsonl").write_text('{"step": 1}\n'), ["metrics.jsonl", "line 1"]),
    "metrics text": (
        lambda run: (run / "metrics.jsonl").write_text('{"step": 1, "split": "dev", "loss": "<b>"}\n'), ["line 1"]
    ),
    "deep metrics": (lambda run: (run / "metrics.jsonl").write_text("[" * 99999 + "\n"), ["metrics.jsonl", "line 1"]),
    "metrics round": (
        lambda run: (run / "metrics.jsonl").write_text(
            '{"step": 1, "seconds": 1, "memory": 1, "round": {"own": 1.0}}\n'
        ),
        ["metrics.jsonl", "line 1"],
    ),
    "metrics list": (lambda run: (run / "metrics.jsonl").write_bytes(b"[1]\n"), ["line 1"]),
    "metrics folder": (lambda run: ((run / "metrics.jsonl").unlink(), (run / "metrics.jsonl").mkdir()), ["plain file"]),
    "summary": (lambda run: (run / "summary.json").write_text("{"), ["summary.json", "cannot be read"]),
    "summary list": (lambda run: (run / "summary.json").write_text("[]"), ["summary.json", "not a JSON object"]),
    "summary kind": (lambda run: (run / "summary.json").write_text('{"steps": "9"}'), ["steps is '9'"]),
    "summary size": (lambda run: (run / "summary.json").write_text('{"ranks": 1e99}'), ["ranks is"]),
    "summary metrics": (lambda run: (run / "summary.json").write_text('{"after": [1]}'), ["after is '[1]'"]),
    "answers": (lambda run: (run / "answers.json").write_text("{}"), ["answers.json has no counts of answers"]),
    "answers count": (lambda run: damaged(run, "rows", -1), ["answers.json has no counts"]),
    "answers size": (lambda run: damaged(run, "of", 1 << 40), ["answers.json has no counts"]),
    "answers shown": (lambda run: damaged(run, "shown", [{"row": 1}]), ["answers.json has no counts"]),
    "answers label": (lambda run: damaged(run, "labels", [{"label": "x", "rows": 1}]), ["answers.json has no counts"]),
    "answers sum": (lambda run: too_many_right(run), ["answers.json has no counts"]),
    "summary losses": (lambda run: (run / "summary.json").write_text('{"losses": []}'), ["losses is"]),
    "plan": (lambda run: (run / "plan.json").write_text('[{"name": "x"}]'), ["plan.json", "parameters"]),
    "plan shape": (
        lambda run: (run / "plan.json").write_text('[{"name": "x", "shape": [-1], "trained": true}]'), ["plan.json"]
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_run_is_refused_in_words_and_nothing_is_written(kind, run, tmp_path):
    damage, parts = DAMAGE[kind]
    damage(run)
    write_manifest(run, FILES)  # as whoever damaged it by intent would
    refused(tezo("report", run, "--output", tmp_path / "report.html"), run, *parts)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_requests_that_cannot_work_are_refused(home, run, tmp_path):
    page_of = ("report", home / "one")
    output = tmp_path / "report.html"
    refused(tezo("report", tmp_path / "nowhere", "--output", output), "nowhere", "no such run folder")
    refused(tezo("report", tmp_path, "--output", output), "is no run folder")
    refused(tezo(*page_of), "output is not set", "--output")
    refused(tezo(*page_of, home / "one" / "..//one", "--output", output), "more than once")
    refused(tezo("report", *[home / "one"] * 9, "--output", output), "9 runs", "1 to 8")
    refused(tezo(*page_of, "--output", tmp_path / "no" / "report.html"), "is no folder")
    refused(tezo(*page_of, "--output", run / "config.yaml"), "config.yaml", ".html")
    refused(tezo(*page_of, "--output", "/proc/report.html"), "/proc/report.html", "cannot be written")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    output.mkdir()
    refused(tezo(*page_of, "--output", output), output, "is a folder")
    assert not list(output.iterdir())


def test_a_page_that_cannot_be_written_leaves_the_one_before(home, tmp_path, monkeypatch):
    reported(tmp_path, home / "one")
    before = (tmp_path / "report.html").read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tezo.system.files.write_all", full)
    done = tezo("report", home / "two", "--output", tmp_path / "report.html")
    refused(done, "report.html cannot be written", "No space left")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert (tmp_path / "report.html").read_bytes() == before


@pytest.mark.parametrize("package", ["jinja2", "matplotlib"])
def test_without_a_package_the_error_says_what_to_install(package, home, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    refused(tezo("report", home / "one", "--output", tmp_path / "r.html"), f"pip install {package}")
    assert not list(tmp_path.iterdir())


def test_a_long_run_makes_a_small_page(tmp_path):
    draw = random.Random(0)
    folder = made(tmp_path / "long", [draw.gauss(2, 0.1) for _ in range(5000)])
    text = page.page([read_run(folder)])
    assert len(text) < 200_000
    (axes,) = charts.loss_charts([read_run(folder)]).values()
    assert "at 5000." in axes["steps"].description


@pytest.mark.parametrize(("name", "ranks"), [("-x", 1), ("it's here; rm -rf", 2)])
def test_the_command_survives_a_shell(name, ranks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made(Path(name), [1.0, 2.0], summary={"ranks": ranks, "bytes_sent": 2048, "exchanges": 4})
    shown = reported(tmp_path, f"./{name}")
    (command,) = (w for w in shown.words if " --output " in w)
    done = subprocess.run(
        ["bash", "-c", f"show() {{ printf '%s\\n' \"$@\"; }}; show {command}"], capture_output=True, text=True
    )
    *program, config, flag, new = done.stdout.splitlines()
    assert (program[-1], program[0]) == ("train", "torchrun" if ranks > 1 else "tezo")
    assert Path(config) == Path(name) / "config.yaml" and Path(new) == Path(f"{name}-again") and flag == "--output"
    assert not config.startswith("-")
    assert ("2.00 KiB" in "".join(shown.words)) == (ranks > 1)
