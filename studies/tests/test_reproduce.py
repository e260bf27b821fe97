"""The paper's tables as grids of runs: what is planned, a whole small table, what a second start does."""

import csv
import json
import math
import re
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from folders import refused, tezo
from task_folders import write_task
from tezo_studies.reproduce import TABLES, Cell, find_table, make_grid, write_tables
from tezo_studies.reproduce.grid_runs import prepare_output, run_cell
from tezo_studies.reproduce.layout import tied_with_the_best
from tezo_studies.reproduce.results import Entry, all_cells, entries, is_finished
from tezo_studies.reproduce.small_models import small_model
from torch import nn

from tezo.methods import method
from tezo.system.errors import RequestError
from tezo.tasks.catalogue import TASKS
from tezo.training.settings import overlay, parse_config, read_config, recipe_folder


def grid_of(name: str, **options):
    return make_grid(find_table(name), **({"model": None, "small": False, "data_dir": None} | options))


OURS = ("encoder", "study", "study-long", "study-decoder")
PAPERS = [name for name in TABLES if name not in OURS]


@pytest.mark.parametrize("name", PAPERS)
def test_every_cell_is_a_configuration_with_the_papers_settings(name):
    table, cells = TABLES[name], list(grid_of(name).search())
    assert len({cell.folder for cell in cells}) == len(cells)
    for cell in cells:
        config = parse_config(cell.tree)
        assert config.data.task == cell.column.task and config.model.name == table.model
        if not cell.line.is_zeroth_order:
            continue
        assert (config.train.steps, config.train.batch_size) == (table.steps, table.batch_size)
        assert config.method.name == cell.line.method and config.method.options["targets"][0] == "all"
    searched = [cell for cell in cells if cell.line.label == "MeZO" and cell.column == table.columns[0]]
    assert {cell.rate for cell in searched} == {1e-4, 1e-5, 1e-6, 1e-7}
    assert {cell.seed for cell in searched} == set(table.seeds)
    for cell in cells:
        if cell.line.is_zeroth_order:  # ZO-AdaMU's steps have the scale of plain ones
            adam = cell.line.label in ("MeZO-Adam", "TeZO-Adam")
            assert cell.line.rates == ((1e-4, 3e-5, 1e-5, 3e-6) if adam else (1e-4, 1e-5, 1e-6, 1e-7)), cell.line.label


@pytest.mark.parametrize("name", PAPERS)
def test_the_papers_averages_follow_from_its_numbers(name):
    table = find_table(name)
    lines = {line.label: line for line in table.lines}
    for line in table.lines:
        assert line.published_averages.keys() == set(table.groups)
        for group, average in line.published_averages.items():
            pairs = zip(line.published, lines["FT"].published, table.columns, strict=True)
            gaps = [a - b for a, b, column in pairs if column.group == group]
            assert sum(gaps) / len(gaps) == pytest.approx(average, abs=0.11), (line.label, group)


def test_each_k_of_roberta_has_an_average_beside_the_published_one(tmp_path):
    grid = grid_of("roberta-large", only=["ft", "mezo"])
    figures = {"FT": 0.9, "MeZO": 0.8}
    for cell in grid.search():
        drop = 0.3 if cell.column.per_class == 512 and cell.line.label == "MeZO" else 0.0
        end(tmp_path, cell, 0.5, figures[cell.line.label] - drop)
    write_tables(grid, tmp_path)
    head, _, *body = body_of(tmp_path)
    names = [name.strip() for name in head.split("|")[2:-1]]
    assert [place for place, name in enumerate(names) if name.startswith("AVG.")] == [5, 11]
    assert (names[5], names[11]) == ("AVG., k=16", "AVG., k=512")
    mezo = [cell.strip() for cell in body[1].split("|")[2:-1]]
    assert (mezo[5], mezo[11]) == ("-10.0 (-8.7)", "-40.0 (-3.3)")
    found = list(csv.DictReader((tmp_path / "averages.csv").read_text().splitlines()))
    assert [(row["columns"], row["average"], row["published"]) for row in found if row["method"] == "MeZO"] == [
        ("k=16", "-10.0", "-8.7"), ("k=512", "-40.0", "-3.3")
    ]  # fmt: skip
    part = grid_of("roberta-large", only=["mezo", "sst5-16", "sst5-512", "snli-512"]).table.lines[0]
    assert not part.published_averages, "of all columns"


@pytest.mark.parametrize("name", TABLES)
def test_low_rank_directions_have_the_scale_that_the_rates_are_for(name):
    for directions, scale in ((None, "raw" if name in PAPERS else "unit"), ("raw", "raw"), ("unit", "unit")):
        options = {"data_dir": "DATA", "directions": directions}
        for cell in grid_of(name, **options).search():
            if cell.line.how == "train" and "scale" in method(cell.line.method).options():
                published = cell.line.label == "SubZO" and name in PAPERS  # its public code has unit variance
                assert cell.tree["method"].get("scale", "unit") == ("unit" if published else scale), cell.folder


def test_settings_are_those_of_all_runs_that_have_them():
    given = [("model.dtype", "float16"), ("method.rank", "3"), ("train.steps", "7")]
    for small in (False, True):
        cells = list(grid_of("llama-7b", small=small, settings=given).search())
        assert {cell.tree["model"]["dtype"] for cell in cells} == {"float16"}
        assert {cell.steps for cell in cells if cell.line.how == "train"} == {7}
        ranks = {cell.line.label: parse_config(cell.tree).method.options.get("rank") for cell in cells}
        assert ranks == {label: 3 if label in ("SubZO", "LOZO", "TeZO", "TeZO-Adam") else None for label in ranks}


@pytest.mark.parametrize(
    ("setting", "parts"),
    [
        ("method.lr=1", ["method.lr is decided by the table"]),
        ("train.seed=1", ["train.seed is decided"]),
        ("method.rnk=1", ["has the option rnk", "Did you mean 'rank'"]),
        ("method.rank=1", ["no method of these cells has the option rank"]),
        ("train.stepz=1", ["train.stepz", "'steps'"]),
    ],
)
def test_a_setting_that_is_not_for_the_runs_is_refused(tmp_path, setting, parts):
    only = "mezo" if setting == "method.rank=1" else "mezo,tezo"
    more = ("--only", only, "--set", setting, "--output", tmp_path / "out")
    refused(tezo("reproduce", "llama-7b", *more), *parts)
    assert not (tmp_path / "out").exists()


def test_a_folder_goes_on_with_its_own_settings_alone(tmp_path):
    prepare_output(grid_of("llama-7b"), tmp_path / "out")
    prepare_output(grid_of("llama-7b"), tmp_path / "out")
    for other in ({"directions": "unit"}, {"settings": [("train.steps", "7")]}):
        with pytest.raises(RequestError, match="give another --output"):
            prepare_output(grid_of("llama-7b", **other), tmp_path / "out")


def test_the_papers_recipes_are_cells_of_its_table():
    cells = {cell.line.method: cell for cell in grid_of("opt-13b", only=["sst2"]).search()
             if cell.line.how == "train" and cell.rate == cell.line.recommended}  # fmt: skip
    for name, cell in cells.items():
        if name in ("adam", "zo-adamu"):  # no recipe, and a rate that the paper does not give
            continue
        recipe, own = read_config(recipe_folder() / f"{name}.yaml", []), parse_config(cell.tree)
        filled = [method(name).defaults() | dict(config.method.options) for config in (recipe, own)]
        assert filled[0] == filled[1], name
        assert (recipe.data.task, recipe.data.num_train, recipe.data.num_dev, recipe.data.num_test) == (
            own.data.task, own.data.num_train, own.data.num_dev, own.data.num_test
        )  # fmt: skip
        assert (recipe.train.steps, recipe.train.batch_size, recipe.train.guard) == (
            own.train.steps, own.train.batch_size, own.train.guard
        )  # fmt: skip


ROWS = [(name, line.key) for name, table in TABLES.items() for line in table.lines if line.how == "train"]


@pytest.mark.parametrize(("name", "row"), ROWS, ids="-".join)
def test_the_recipe_of_a_row_is_its_first_cell_and_builds_its_optimizer(name, row):
    import yaml

    grid = grid_of(name, data_dir="DATA" if name == "study-decoder" else None)
    config = parse_config(yaml.safe_load(grid.recipe(row)))
    first = (cell for cell in grid.search() if cell.line.key == row and cell.rate == cell.line.recommended)
    assert config == parse_config(next(first).tree)
    model = nn.Sequential(OrderedDict(wide=nn.Linear(80, 80), token_type_embeddings=nn.Embedding(80, 80)))
    optimizer = method(config.method.name).build(model, **config.method.options)
    assert optimizer.param_groups[0]["lr"] == config.method.options["lr"]


def test_the_command_prints_the_recipe_of_a_row_and_names_the_nearest_one():
    done = tezo("reproduce", "opt-13b", "--recipe", "LOZO-m")
    assert (done.code, done.out) == (0, grid_of("opt-13b").recipe("lozo-m"))
    refused(tezo("reproduce", "opt-13b", "--recipe", "lozzo"), "lozzo", "'lozo'")


def test_only_some_cells_can_be_chosen():
    grid = grid_of("opt-13b", only=["mezo", "TeZO-Adam", "rte"])
    assert {cell.line.label for cell in grid.search()} == {"MeZO", "TeZO-Adam"}
    assert [line.published for line in grid.table.lines] == [(60.3,), (71.8,)]
    done = tezo("reproduce", "opt-13b", "--output", "unused", "--only", "mezzo")
    refused(done, "only", "'mezzo'", "Did you mean 'mezo'")
    refused(tezo("reproduce", "opt-31b", "--output", "unused"), "table", "Did you mean 'opt-13b'")


def test_a_plan_is_shown_and_nothing_run(tmp_path):
    done = tezo("reproduce", "llama-7b", "--output", tmp_path / "out", "--only", "mezo,rte", "--plan")
    assert done.out.splitlines()[-1] == f"8 runs, {8 * 15_000} steps"
    assert not (tmp_path / "out").exists()


def test_lines_of_the_decoders_study_differ_in_their_directions_alone():
    grid = grid_of("study-decoder", data_dir="rows")
    cells = [cell for cell in grid.search() if cell.line.is_zeroth_order and not fed_of(cell)]
    assert {cell.steps for cell in cells} == {200} and {cell.seed for cell in cells} == {0}
    assert {(cell.column.key, cell.tree["train"]["batch_size"]) for cell in cells} == {
        ("completions-batch-16", 16), ("completions-batch-64", 64),
    }  # fmt: skip
    by_line = {line.key: line for line in grid.table.lines}
    each_own = [key for key in {cell.line.key for cell in cells} if "per-example" in key]
    pairs = [(by_line[key.removesuffix("-per-example")], by_line[key]) for key in each_own]
    assert len(pairs) == 5
    for shared, each in pairs:
        assert each.rates == shared.rates and each.options == {**shared.options, "directions": "per-example"}
        assert each.settings == shared.settings
        assert shared.options.get("directions", "shared") == "shared"
    config = parse_config(cells[0].tree)
    assert config.data.train == "rows/completions/train.jsonl" and config.data.test == "rows/completions/test.jsonl"
    with pytest.raises(RequestError, match="data-dir: completions is not on the hub"):
        list(grid_of("study-decoder").search())


def test_every_line_of_the_study_spends_the_same_forward_passes_and_is_read_off_as_often():
    cells = [cell for cell in grid_of("study").search() if cell.line.is_zeroth_order and not fed_of(cell)]
    spent = {cell.line.key: 2 * cell.tree["method"].get("num_directions", 1) * cell.steps for cell in cells}
    assert set(spent.values()) == {480}
    assert {cell.steps // cell.tree["train"]["eval_every"] for cell in cells} == {10}
    quarter = next(cell for cell in cells if cell.line.label.endswith("4 directions"))
    assert (quarter.steps, quarter.tree["train"]["eval_every"]) == (60, 6)
    schedules = {cell.line.label: cell.tree["train"].get("schedule") for cell in cells}
    assert [label for label, schedule in schedules.items() if schedule] == ["LOZO-Adam + act, linear"]
    assert all(cell.tree["data"]["num_dev"] == 100 and not cell.tree["train"]["keep_best"] for cell in cells)


def fed_of(cell) -> list[int]:
    """How many steps each of its stretches of feedback steps has."""
    return [n for place in ("first", "last") if (n := cell.tree.get("train", {}).get(f"feedback_{place}"))]


@pytest.mark.parametrize(
    ("study", "budget", "lines"), [("study", 480, 5), ("study-long", 1920, 1), ("study-decoder", 400, 1)]
)
def test_lines_with_feedback_steps_spend_no_more_and_no_two_passes_less(study, budget, lines):
    found = {cell.line.key: cell for cell in grid_of(study, data_dir="rows").search() if fed_of(cell)}
    assert len(found) == lines
    for cell in found.values():
        of_one, rest = fed_of(cell), cell.steps - sum(fed_of(cell))
        assert budget - 1 <= sum(of_one) + 2 * len(of_one) + 2 * rest <= budget


def test_the_longer_study_is_the_same_but_for_its_length():
    short = {str(cell.folder): cell.tree for cell in grid_of("study").search()}
    for cell in grid_of("study-long").search():
        trees = (cell.tree, deepcopy(short[str(cell.folder).replace("-refresh-240", "")]))
        if "refresh-240" in str(cell.folder):
            assert trees[0]["method"].pop("lazy_update_interval") == 240
        lengths = [(tree["train"].pop("steps", None), tree["train"].pop("eval_every")) for tree in trees]
        assert trees[0] == trees[1]
        assert lengths == [(960, 96), (240, 24)] or not cell.line.is_zeroth_order or fed_of(cell)


def test_fine_tuning_has_ten_epochs_of_few_rows_and_of_many_no_more_steps_than_the_other_lines():
    cells = [cell for cell in grid_of("study").search() if cell.line.method == "adam"]
    found = {cell.column.key: cell.steps for cell in cells}
    assert found["sst2-16"] == 10 * 2 * 16 // 8 and found["trec-16"] == 10 * 6 * 16 // 8
    assert found["sst2-512"] == found["trec-512"] == 240


def test_a_label_names_its_folder_and_is_chosen_by_either():
    keys = [line.key for line in TABLES["study"].lines]
    assert len(set(keys)) == len(keys) and all(re.fullmatch(r"[a-z0-9]+([.-][a-z0-9]+)*", key) for key in keys)
    for name in ("cAdam + act", "cadam-act"):
        assert [line.label for line in grid_of("study", only=[name, "trec-512"]).table.lines] == ["cAdam + act"]
    small_cells = list(grid_of("study", only=["lozo-adam-act-4-directions"], small=True).search())
    assert {(cell.steps, cell.tree["data"]["num_dev"]) for cell in small_cells} == {(3, 8)}, "cut like all others"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    for name in TASKS:
        write_task(root, name, 60, 14)
    return root


class InThisProcess(Executor):
    """Of the same calls as a pool of processes, each of which would import for seconds."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Whatever a pool is given."""

    def submit(self, call: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future:
        done: Future = Future()
        done.set_result(call(*arguments, **named))
        return done


@pytest.fixture
def in_this_process(monkeypatch):
    monkeypatch.setattr("tezo_studies.reproduce.grid_runs.ProcessPoolExecutor", InThisProcess)


def small(name: str, output: Path, data: Path, *more: str):
    return tezo("reproduce", name, "--scale", "small", "--data-dir", data, "--output", output, *more)


@pytest.mark.parametrize(
    ("name", "tasks"),
    [
        pytest.param("llama-7b", "rte,wic", marks=pytest.mark.slow),
        ("roberta-large", "trec"),
        pytest.param("opt-13b", "squad,copa", marks=pytest.mark.slow),
        pytest.param("encoder", "sst2", marks=pytest.mark.slow),
        ("study", "sst2"),
        pytest.param("study-long", "sst2", marks=pytest.mark.slow),
    ],
)
def test_a_small_table_is_run_and_written_in_the_papers_layout(tmp_path, data, in_this_process, name, tasks):
    output = tmp_path / "out"
    methods, half = "ft,zero-shot,mezo,tezo", ("--dtype", "float16") if name in PAPERS else ()
    done = small(name, output, data, "--only", f"{methods},{tasks}", *half)
    assert done.code == 0, done.err
    text = (output / "table.md").read_text()
    assert "SMALL SCALE" in text.splitlines()[0] and "accuracies mean nothing" in text.splitlines()[0]
    body = [line for line in text.splitlines() if line.startswith("| ")][1:]
    lines = {line.split("|")[1].strip(): line for line in body}
    assert set(lines) == {"FT", "ZERO-SHOT", "MeZO", "TeZO"}
    number = r"\d+\.\d" if name in OURS else r"\d+\.\d \(\d+\.\d\)"
    assert all(re.search(rf"\| {number} \|", line) for line in body), text
    assert not any("failed" in line for line in body) and "+0.0" in lines["FT"]
    rows = list(csv.DictReader((output / "table.csv").read_text().splitlines()))
    assert len(rows) == 4 * len(paper_columns(name, tasks)) and {row["missing"] for row in rows} == {"0"}
    assert {row["failed"] for row in rows} == {"0"}
    assert ("model.dtype=float16" in text) == (name in PAPERS)
    assert ("both are of the last step" in text) == name.startswith("study")
    assert {path.name for path in output.glob("*.*")} >= {"table.md", "table.csv", "runs.csv"}


@pytest.mark.slow
@pytest.mark.parametrize("name", PAPERS)
def test_no_cell_of_a_whole_table_fails_in_half_precision(tmp_path, data, in_this_process, name):
    done = small(name, tmp_path / "out", data, "--dtype", "float16")
    assert done.code == 0, done.err
    rows = list(csv.DictReader((tmp_path / "out/table.csv").read_text().splitlines()))
    assert len(rows) == len(TABLES[name].lines) * len(TABLES[name].columns)
    assert {(row["failed"], row["missing"]) for row in rows} == {("0", "0")}
    runs = list((tmp_path / "out").rglob("config.yaml"))
    assert runs and {read_config(path, []).model.dtype for path in runs} == {"float16"}


def test_a_model_of_the_users_is_never_written(tmp_path, data, in_this_process, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = small("study", tmp_path / "out", data, "--model", "absent/model", "--only", "mezo,sst2-16")
    assert done.code == 1 and "failed: model.name" in done.out
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def paper_columns(name: str, tasks: str) -> list:
    return [column for column in find_table(name).columns if column.task in tasks.split(",")]


def body_of(output: Path) -> list[str]:
    return [line for line in (output / "table.md").read_text().splitlines() if line.startswith("|")]


@pytest.mark.parametrize("pool", [InThisProcess, pytest.param(ProcessPoolExecutor, marks=pytest.mark.slow)])
def test_a_second_start_runs_what_is_missing_alone(tmp_path, data, capfd, monkeypatch, pool):
    monkeypatch.setattr("tezo_studies.reproduce.grid_runs.ProcessPoolExecutor", pool)
    output = tmp_path / "out"
    assert small("llama-7b", output, data, "--only", "mezo,tezo,rte").code == 0
    assert not capfd.readouterr().err, "libraries of the runs' own processes"
    whole = body_of(output)
    finished, unfinished = output / "mezo/rte", output / "tezo/rte"
    (kept,) = finished.rglob("summary.json")
    stamp = kept.stat().st_mtime_ns
    (lost,) = unfinished.rglob("summary.json")
    for path in (lost, lost.with_name("manifest.json")):  # as a killed run leaves its folder
        path.unlink()
    assert "2 runs, 1 of them finished" in (again := small("llama-7b", output, data, "--only", "mezo,tezo,rte")).out
    assert again.code == 0, again.err
    assert kept.stat().st_mtime_ns == stamp and lost.is_file()
    assert body_of(output) == whole, "a run is a function of its configuration"
    refused(small("opt-13b", output, data), "output", "llama-7b", "opt-13b")
    (tmp_path / "used").mkdir()
    (tmp_path / "used/file").write_text("mine")
    refused(small("llama-7b", tmp_path / "used", data), "output", "exists already")


def test_a_cell_that_cannot_run_is_named_the_others_go_on_and_it_is_tried_again(tmp_path, data, in_this_process):
    root, output = tmp_path / "data", tmp_path / "out"
    root.mkdir()
    (root / "rte").symlink_to(data / "rte")
    done = small("llama-7b", output, root, "--only", "mezo,rte,wic")
    assert done.code == 1 and "for the reasons above: 1." in done.err
    assert "wic" in done.out and "failed: data.dir" in done.out
    line = next(line for line in body_of(output) if line.startswith("| MeZO"))
    assert "- (60.5)" in line and "(69.0)" in line
    (root / "wic").symlink_to(data / "wic")
    again = small("llama-7b", output, root, "--only", "mezo,rte,wic")
    assert again.code == 0 and "2 runs, 1 of them finished" in again.out, again.err
    assert "- (" not in next(line for line in body_of(output) if line.startswith("| MeZO"))


def test_a_loss_that_is_no_number_ends_a_run_for_good(tmp_path, data):
    grid = make_grid(find_table("llama-7b"), model=None, small=True, data_dir=str(data), only=["mezo", "rte"])
    (cell,) = grid.search()
    small_model("causal", tmp_path / "model")
    tree = overlay(cell.tree, [("model.name", str(tmp_path / "model")), ("method.lr", 1e30), ("train.steps", 3)])
    fault = run_cell(replace(cell, tree=tree), str(tmp_path / "run"), "cpu")
    assert "the loss is" in fault and (tmp_path / "run/failed.txt").read_text().strip() == fault
    assert is_finished(tmp_path / "run")


def test_the_learning_rate_is_chosen_by_the_dev_loss_and_seeds_are_averaged(tmp_path):
    grid = grid_of("llama-7b", only=["mezo", "rte"])
    for cell in grid.search():
        folder = tmp_path / cell.folder
        folder.mkdir(parents=True)
        if cell.rate == 1e-4 and cell.seed == 1:
            (folder / "failed.txt").write_text("the loss is nan\n")
            continue
        dev = {1e-4: 0.0, 1e-5: math.nan, 1e-6: 0.4, 1e-7: 0.6}[cell.rate]
        end(tmp_path, cell, dev, 0.5 + cell.seed / 10 + dev)
    ((entry,),) = entries(grid, tmp_path)
    assert entry.rate == 1e-6 and entry.values == pytest.approx((90.0, 100.0)) and entry.failed == 1
    assert entry.shown == "95.0 ± 7.1*"
    names = {path.name for path in write_tables(grid, tmp_path)}
    assert names == {"table.md", "table.csv", "averages.csv", "runs.csv"}


def test_seeds_beyond_the_search_run_at_the_rate_that_it_chose(tmp_path):
    grid = grid_of("encoder", only=["mezo", "ft", "zero-shot", "probe", "trec-16"])
    first, *others = grid.table.seeds
    searched = [cell for cell in grid.search() if cell.line.how == "train"]
    assert len(searched) == 2 * 3 and {cell.seed for cell in searched} == {first}
    probed = [(cell.line.how, cell.seed) for cell in grid.search() if cell.line.how != "train"]
    assert sorted(probed) == [("probe", first), *(("probe", seed) for seed in others), ("zero-shot", first)]
    assert list(all_cells(grid, tmp_path)) == list(grid.search()), "nothing is chosen before a run has ended"
    for cell in searched:
        if cell.line.label == "MeZO":
            end(tmp_path, cell, {1e-5: 0.5, 3e-5: 0.3, 1e-4: 0.4}[cell.rate], 0.5)
    follow = list(all_cells(grid, tmp_path))[len(list(grid.search())) :]
    assert [(cell.line.label, cell.rate, cell.seed) for cell in follow] == [("MeZO", 3e-5, seed) for seed in others]
    for cell, figure in zip(follow, (0.6, 0.7), strict=True):
        end(tmp_path, cell, 0.0, figure)
    entry = next(entry for (entry,) in entries(grid, tmp_path) if entry.line.label == "MeZO")
    assert entry.values == pytest.approx((50.0, 60.0, 70.0)) and not entry.missing and not entry.at_an_end


def end(output: Path, cell: Cell, dev_loss: float, accuracy: float) -> None:
    folder = output / cell.folder
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "summary.json").write_text(json.dumps({"after": {"accuracy": accuracy}, "dev_loss": dev_loss}))


def test_means_that_the_spread_does_not_tell_apart_are_marked():
    table = find_table("encoder")
    line = {line.label: line for line in table.lines}

    def entry(label: str, *values: float) -> Entry:
        return Entry(line[label], table.columns[0], None, values, 1e-4, 0, 0)

    best, near = entry("TeZO", 80.0, 82.0, 84.0), entry("MeZO", 79.0, 80.0, 81.0)
    far, wide, first_order = entry("LOZO", 79.0, 79.5, 80.0), entry("SubZO", 70.0, 76.0, 82.0), entry("FT", 99.0, 99.5)
    column = [best, near, far, wide, first_order]
    marked = [each.line.label for each in column if tied_with_the_best(each, column)]
    assert marked == ["TeZO", "MeZO", "SubZO"], "first-order fine-tuning is not among the rivals"
