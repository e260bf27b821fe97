"""The study's reader, on run folders that are made up: crossings, medians, gaps and passes have closed forms."""

import functools
import json
import math
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from tezo_studies.reproduce import Cell, Grid, find_table, make_grid

from tezo.optim.estimators.estimate import Probe, StepRecord
from tezo.runs.step_log import StepLog
from tezo.training.rows_of_steps import FIRST, LAST

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import study  # noqa: E402
from study_numbers import crossing, numbers_of  # noqa: E402

SEEDS = (13, 21, 42)
LINES = ["ft", "mezo", "tezo", "tezo-adam", "cadam-act", "cadam-act-refresh-60", "lozo-adam-act-4-directions",
         "lozo-adam-act-feedback"]  # fmt: skip


@pytest.mark.parametrize(
    ("losses", "target", "expected"),
    [
        ([1.0, 0.6, 0.2], 0.5, 125.0),
        ([1.0, 0.6, 0.2], 0.6, 100.0),
        ([1.0, 0.6, 0.2], 1.5, 0.0),
        ([1.0, 0.6, 0.2], 1.0, 0.0),
        ([1.0, 0.6, 0.2], 0.1, math.inf),
        ([1.0, 0.4, 0.9], 0.7, 50.0),
        ([1.0, 1.2, 0.2], 0.7, 150.0),
    ],
    ids=["between", "at a point", "below at the start", "at the start", "never", "the first of two", "after a rise"],
)
def test_a_crossing_is_where_the_straight_line_between_evaluations_is(losses, target, expected):
    assert crossing([0.0, 100.0, 200.0], losses, target) == pytest.approx(expected)


def grid_in(folder: Path, *columns: str) -> Grid:
    note = {"table": "study", "model": "m", "small": False}
    folder.mkdir(exist_ok=True)
    (folder / "grid.json").write_text(json.dumps(note))
    return make_grid(find_table("study"), model="m", small=False, data_dir=None, only=[*LINES, *columns])


@functools.cache
def log_of(directions: int, steps: int, first: int, last: int) -> bytes:
    """A step log, with feedback steps at both ends."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "steps.log"
        log, drawn = (
            StepLog(path, {"directions": directions, "kinds": ["two-point", "feedback"]}),
            (Probe(1.0, 1.0, 0.0),) * directions,
        )
        for i in range(steps):
            along = first <= i < steps - last
            begins = directions > 0 and i in ({0} if first else set()) | ({steps - last} if last else set())
            passes = 2 * directions or 1 if along else 1 + 2 * begins
            kind = "two-point" if along else "feedback"
            log.append(StepRecord(i, 1.0, 0.1, drawn if along else (), kind, passes))
        log.close()
        return path.read_bytes()


def end(folder: Path, cell: Cell, losses: list[float], after: float, **more) -> None:
    """A run's folder, with evaluations at equal distances from its first step to its last."""
    own = folder / cell.folder
    own.mkdir(parents=True, exist_ok=True)
    steps = [round(i * cell.steps / (len(losses) - 1)) for i in range(len(losses))]
    directions = cell.tree["method"].get("num_directions", 1) if cell.line.is_zeroth_order else 0
    fed = [cell.tree["train"][f"feedback_{place}"] for place in ("first", "last")]
    (own / "steps.log").write_bytes(log_of(directions, cell.steps, *fed))
    log = StepLog(own / "steps.log", {})
    for step, loss in zip(steps, losses, strict=True):
        log.append_evaluation("dev", step, {"loss": loss, "accuracy": 1 - loss})
    log.close()
    made = {"before": {"accuracy": 0.5}, "after": {"accuracy": after}, "dev_loss": losses[-1], "steps": cell.steps}
    made |= {"seconds_stepping": 9.0, "hardware": "a machine", "versions": {"torch": "2", "transformers": "5"}}
    exports = {"kind": "adapter" if "cadam" in cell.line.key or cell.line.key == "tezo" else "model"}
    (own / "summary.json").write_text(json.dumps(made | {"result": exports} | more))


def fill(folder: Path, grid: Grid, shown: Callable[[Cell], tuple[list[float], float]], **more) -> None:
    """All runs: at the middle rate as `shown`, at the others with a dev loss above."""
    for cell in [*grid.search(), *grid.rest(lambda line, _: line.recommended)]:
        losses, after = shown(cell)
        worse = [losses[0], losses[0] + 1] if cell.rate != cell.line.recommended else losses
        end(folder, cell, worse, after, **more)


def curves_in(folder: Path) -> dict:
    grid = study.grid_of(folder)
    cells = list(study.all_cells(grid, folder))
    return study.curves_of(grid, list(study.read_runs(grid, folder, cells)), study.failures(folder, cells))


def by_key(made: dict) -> dict[str, dict]:
    return {line["key"]: line for line in made["lines"]}


def falling(to: float) -> list[float]:
    return [1 - (1 - to) * i / 10 for i in range(11)]


def test_shares_of_the_budget_are_medians_over_columns_and_seeds_where_never_is_infinite(tmp_path):
    grid = grid_in(tmp_path, "sst2-16", "trec-16")
    # straight lines from 1 to an end cross 0.8, where TeZO ends, after 0.2 / (1 - end) of the budget
    ends = {"tezo": [0.8] * 3, "tezo-adam": [0.6] * 3, "cadam-act": [0.2, 0.5, 0.9], "mezo": [0.5, 0.9, 0.9]}

    def shown(cell: Cell):
        return falling(ends.get(cell.line.key, [0.7] * 3)[SEEDS.index(cell.seed)]), 0.7

    fill(tmp_path, grid, shown)
    lines = by_key(numbers_of(curves_in(tmp_path)))
    found = lines["cadam-act"]
    assert found["passes_to_tezo"] == {"median": pytest.approx(0.4), "reached": 4, "of": 6}
    assert found["passes_to_tezo_adam"] == {"median": pytest.approx(0.8), "reached": 4, "of": 6}
    assert found["columns"]["trec-16"]["passes_to_tezo"]["median"] == pytest.approx(0.4)
    assert lines["mezo"]["passes_to_tezo"] == {"median": None, "reached": 2, "of": 6}
    assert lines["tezo"]["passes_to_tezo"]["median"] == pytest.approx(1.0)
    assert lines["lozo-adam-act-4-directions"]["passes_to_tezo"]["median"] == pytest.approx(2 / 3)
    assert lines["ft"]["passes_to_tezo"]["of"] == 0, "a pass of fine-tuning is forward and backward"


def test_passes_that_collect_a_basis_are_paid_at_the_first_step_of_their_interval(tmp_path):
    grid = grid_in(tmp_path, "sst2-16")
    fill(tmp_path, grid, lambda _: (falling(0.5), 0.7), basis_passes=8, seconds_on_basis=1.5)
    made = curves_in(tmp_path)
    passes = {key: line["columns"]["sst2-16"]["runs"][0]["passes"] for key, line in by_key(made).items()}
    assert passes["cadam-act"] == [0, *(48 * i + 8 for i in range(1, 11))]
    assert passes["cadam-act-refresh-60"] == [48 * i + 2 * math.ceil(24 * i / 60) for i in range(11)]
    assert passes["lozo-adam-act-4-directions"] == passes["cadam-act"], "as many passes in a quarter of the steps"
    (fed,) = (line for line in grid.table.lines if line.key == "lozo-adam-act-feedback")
    steps = dict(fed.settings)["train.steps"]
    found = passes["lozo-adam-act-feedback"]
    # two more at the first step of either stretch
    assert found[1] == 8 + FIRST + 2 + 2 * (round(steps / 10) - FIRST)
    assert found[-1] == 8 + FIRST + 2 + 2 * (steps - FIRST - LAST) + LAST + 2 <= 488
    line = by_key(numbers_of(made))["cadam-act"]
    assert line["basis_share"] == pytest.approx(8 / 488) and line["seconds_on_basis"] == pytest.approx(4.5)


def test_the_gap_to_fine_tuning_is_shared_out_where_there_is_one(tmp_path):
    grid = grid_in(tmp_path, "sst2-16", "trec-16")
    accuracies = {"ft": 0.9, "mezo": 0.7, "cadam-act": 0.75}

    def shown(cell: Cell):
        by_seed = 0.01 * (SEEDS.index(cell.seed) - 1)
        level = accuracies.get(cell.line.key, 0.7) if cell.column.task == "trec" else 0.7
        return falling(0.5), level + by_seed

    fill(tmp_path, grid, shown)
    made = numbers_of(curves_in(tmp_path))
    assert made["gaps"]["trec-16"]["points"] == pytest.approx(0.2) and made["gaps"]["trec-16"]["is_gap"]
    assert not made["gaps"]["sst2-16"]["is_gap"]
    left = {key: line["columns"]["trec-16"]["gap_left"] for key, line in by_key(made).items()}
    assert (left["mezo"], left["ft"], left["cadam-act"]) == pytest.approx((1.0, 0.0, 0.75))
    assert by_key(made)["cadam-act"]["columns"]["sst2-16"]["gap_left"] is None
    accuracy = by_key(made)["cadam-act"]["columns"]["trec-16"]["accuracy"]
    assert accuracy == {"mean": pytest.approx(0.75), "stdev": pytest.approx(0.01), "of": 3}


def test_the_best_adapter_is_the_best_of_those_that_are_adapters_in_every_run(tmp_path):
    grid = grid_in(tmp_path, "sst2-16")
    ends = {"tezo": 0.6, "cadam-act": 0.5, "cadam-act-refresh-60": 0.55}
    fill(tmp_path, grid, lambda cell: (falling(ends.get(cell.line.key, 0.1)), 0.7))
    made = numbers_of(curves_in(tmp_path))
    assert made["best_adapter"] == "cadam-act"
    assert {key for key, line in by_key(made).items() if line["exports"]} == set(ends)


def test_the_search_is_carried_with_what_failed_and_a_rate_at_an_end_is_flagged(tmp_path):
    grid = grid_in(tmp_path, "sst2-16")
    ends = {1e-5: 0.3, 3e-5: 0.4, 1e-4: 0.2}
    for cell in grid.search():
        if cell.line.key == "mezo" and (cell.rate, cell.seed) == (1e-4, 21):
            (tmp_path / cell.folder).mkdir(parents=True)
            (tmp_path / cell.folder / "failed.txt").write_text("the loss is nan\n")
        elif cell.line.key in ("mezo", "tezo"):
            by_seed = 0.03 * (SEEDS.index(cell.seed) - 1)
            end(tmp_path, cell, falling(ends[cell.rate] + by_seed), 0.7)
    lines = by_key(curves_in(tmp_path))
    assert set(lines) == {"mezo", "tezo"}, "lines without a run are left out"
    mezo, tezo = (lines[key]["columns"]["sst2-16"] for key in ("mezo", "tezo"))
    assert mezo["rate"] == 1e-5 and mezo["at_an_end"], "a rate at which a seed failed is not chosen"
    assert mezo["search"] == pytest.approx({"1e-05": 0.3, "3e-05": 0.4, "0.0001": 0.2})
    assert mezo["failed"] == ["lr-0.0001/seed-21"]
    assert (tezo["rate"], tezo["failed"], len(tezo["runs"])) == (1e-4, [], 3)


def test_everything_is_written_from_a_folder_of_runs(tmp_path):
    grid = grid_in(tmp_path / "runs", "sst2-16", "trec-16")
    fill(tmp_path / "runs", grid, lambda _: (falling(0.5), 0.7))
    study.main([str(tmp_path / "runs"), "--results", str(tmp_path / "made"), "--figures", str(tmp_path / "figures")])
    curves, numbers = (json.loads((tmp_path / f"made/{name}.json").read_text()) for name in ("curves", "numbers"))
    assert numbers == json.loads(json.dumps(numbers_of(curves))), "numbers follow from the committed curves alone"
    assert len((tmp_path / "made/runs.csv").read_text().splitlines()) == 1 + 2 * len(LINES) * 9
    svg = (tmp_path / "figures/study.svg").read_text()
    assert all(text in svg for text in ("SST-2, 16 of each class", "FT, final", "cAdam + act", "forward passes"))
    with pytest.raises(SystemExit, match="has no runs of a table; give the --output"):
        study.main([str(tmp_path / "made")])


@pytest.mark.slow
def test_a_study_that_is_read_in_parts_is_the_study_read_at_once(tmp_path):
    def shown(cell: Cell):
        return falling(0.5 + 0.01 * SEEDS.index(cell.seed) + 0.1 * (cell.line.key == "mezo")), 0.7

    whole = grid_in(tmp_path / "whole", "sst2-16", "trec-16")
    fill(tmp_path / "whole", whole, shown)
    parts = [["mezo", "trec-16"], ["tezo", "mezo", "sst2-16"], [*set(LINES) - {"mezo"}, "trec-16"],
             [*set(LINES) - {"mezo", "tezo"}, "sst2-16"]]  # fmt: skip
    for place, only in enumerate(parts):
        grid_in(tmp_path / f"part-{place}")
        part = make_grid(find_table("study"), model="m", small=False, data_dir=None, only=only)
        fill(tmp_path / f"part-{place}", part, shown)
    for runs, name in (("whole", "once"), *((f"part-{place}", "parts") for place in range(len(parts)))):
        read = [str(tmp_path / runs), "--results", str(tmp_path / name), "--figures", str(tmp_path)]
        study.main(read)
    for name in ("curves.json", "numbers.json", "runs.csv"):
        assert (tmp_path / f"parts/{name}").read_text() == (tmp_path / f"once/{name}").read_text(), name


def test_a_column_whose_runs_are_not_all_over_does_not_replace_one_whose_are(tmp_path):
    grid = grid_in(tmp_path / "runs", "sst2-16")
    fill(tmp_path / "runs", grid, lambda _: (falling(0.5), 0.7))
    read = [str(tmp_path / "runs"), "--results", str(tmp_path / "made"), "--figures", str(tmp_path)]
    study.main(read)
    fill(tmp_path / "runs", grid, lambda _: (falling(0.25), 0.7))
    missing = tmp_path / "runs/mezo/sst2-16/lr-1e-05/seed-42/summary.json"
    kept = missing.read_text()
    missing.unlink()
    study.main(read)

    def ends() -> tuple[float, float]:
        lines = by_key(json.loads((tmp_path / "made/numbers.json").read_text()))
        return tuple(lines[key]["columns"]["sst2-16"]["dev_loss"]["mean"] for key in ("mezo", "tezo"))

    assert ends() == pytest.approx((0.5, 0.25))
    missing.write_text(kept)
    study.main(read)
    assert ends() == pytest.approx((0.25, 0.25)), "a column that is whole replaces what was read before"


def test_runs_of_other_settings_are_not_read_beside_those_of_before(tmp_path):
    grid = grid_in(tmp_path / "runs", "sst2-16")
    fill(tmp_path / "runs", grid, lambda _: (falling(0.5), 0.7))
    read = [str(tmp_path / "runs"), "--results", str(tmp_path / "made"), "--figures", str(tmp_path)]
    study.main(read)
    curves = json.loads((tmp_path / "made/curves.json").read_text())
    curves["lines"][1]["options"] = {"rank": 3}
    (tmp_path / "made/curves.json").write_text(json.dumps(curves))
    with pytest.raises(SystemExit, match=r"other settings \(of mezo\); give another --results"):
        study.main(read)


def test_the_documents_tables_are_drawn_from_the_numbers_or_left_out(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import drawing
    import tables

    monkeypatch.setattr(drawing, "RESULTS", tmp_path)
    assert {tables.TABLES[name]() for name in ("study", "study-accuracy", "study-short", "study-ranked")} == {""}
    grid = grid_in(tmp_path / "runs", "sst2-16")
    fill(tmp_path / "runs", grid, lambda cell: (falling(0.2 if "cadam" in cell.line.key else 0.6), 0.7))
    study.main([str(tmp_path / "runs"), "--results", str(tmp_path / "study"), "--figures", str(tmp_path / "figures")])
    drawn = [tables.TABLES[name]().splitlines() for name in ("study", "study-accuracy", "study-short", "study-ranked")]
    rows = [{line.split("|")[1].strip(): line for line in text if line.startswith("| ")} for text in drawn]
    assert rows[0]["cAdam + act"] == "| cAdam + act | 0.200 ± 0.000 (0.0001) | 50 % (3 of 3) | 50 % (3 of 3) |"
    assert rows[1]["cAdam + act"] == "| cAdam + act | 70.0 ± 0.0 |"
    assert rows[2]["MeZO"] == "| MeZO | 100 % (3 of 3) | 100 % (3 of 3) | 0.0 % | no |"
    ranked = [line.split("|")[1].strip() for line in drawn[3] if line.startswith("| ")]
    assert set(ranked[1:3]) == {"cAdam + act", "cAdam + act, refresh 60"} and "FT" not in ranked
    assert rows[3]["MeZO"] == "| MeZO | 0.600 ± 0.000 (3e-05) | 70.0 ± 0.0 | 100 % (3 of 3) | 100 % (3 of 3) |"
    assert "No gap, FT being less than 2 points above MeZO: SST2, k=16." in drawn[1][-1]
    shutil.rmtree(tmp_path / "study")
    shutil.rmtree(tmp_path / "runs/mezo")
    study.main([str(tmp_path / "runs"), "--results", str(tmp_path / "study"), "--figures", str(tmp_path / "figures")])
    assert "No gap" not in tables.TABLES["study-accuracy"](), "without MeZO's runs nobody knows"


def test_lines_that_a_table_no_longer_has_stay_in_the_results_and_have_a_table_of_their_own(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import drawing
    import tables

    monkeypatch.setattr(drawing, "RESULTS", tmp_path)
    grid = grid_in(tmp_path / "runs", "sst2-16")
    fill(tmp_path / "runs", grid, lambda cell: (falling(0.2 if "cadam" in cell.line.key else 0.6), 0.7))
    read = [str(tmp_path / "runs"), "--results", str(tmp_path / "study"), "--figures", str(tmp_path / "figures")]
    study.main(read)
    assert tables.TABLES["study-removed"]() == ""
    for name in ("curves.json", "runs.csv"):
        path = tmp_path / "study" / name
        text = path.read_text().replace("cadam-act", "cadam-old").replace("cAdam + act", "cAdam, old")
        path.write_text(
            text.replace("cadam-old-refresh", "cadam-act-refresh").replace("cAdam, old, re", "cAdam + act, re")
        )
    study.main(read)
    runs = (tmp_path / "study/runs.csv").read_text().splitlines()
    assert sum(run.startswith("cadam-old,") for run in runs) == sum(run.startswith("cadam-act,") for run in runs) == 9
    lines = by_key(json.loads((tmp_path / "study/numbers.json").read_text()))
    assert lines["cadam-old"]["columns"] == lines["cadam-act"]["columns"]
    assert "| cAdam, old | 0.200 ± 0.000 (0.0001) |" in tables.TABLES["study-removed"]().splitlines()
    for name in ("study", "study-accuracy", "study-short", "study-ranked"):
        assert "cAdam + act" in tables.TABLES[name]() and "cAdam, old" not in tables.TABLES[name](), name
