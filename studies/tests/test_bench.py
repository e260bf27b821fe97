"""The benchmark measures what it says: shapes, batches, one order of calls, means over intervals, peaks."""

import time

import pytest
import torch
from tezo_studies.bench.cases import Case, make_case, past_refresh, to_refresh
from tezo_studies.bench.launches import count_launches
from tezo_studies.bench.peak_memory import rows
from tezo_studies.bench.settings import LENGTHS, Settings, entries
from tezo_studies.bench.shapes import SHAPES, from_shape, skeleton
from tezo_studies.bench.step_time import REFRESH_EVERY, REPEATS, Timed, measure_step, run_rounds
from tezo_studies.bench.step_time import rows as step_rows
from tezo_studies.bench.workload import Work

from tezo.system.errors import RequestError

TINY = Settings(model="tiny", batch=3, length="rte", rank=4, rounds=2)
# Of the published checkpoints.
PARAMETERS = {
    "opt-125m": 125_239_296, "opt-350m": 331_196_416, "opt-1.3b": 1_315_758_080, "opt-2.7b": 2_651_596_800,
    "opt-6.7b": 6_658_473_984, "opt-13b": 12_853_473_280, "opt-30b": 29_974_540_288, "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320, "llama-30b": 32_528_943_616, "llama-70b": 68_976_648_192,
}  # fmt: skip


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_shape_has_the_parameters_of_its_model(name):
    model = skeleton(SHAPES[name].make(), torch.bfloat16, torch.device("meta"))
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("name", ["tiny", "tiny-llama"])
def test_random_weights_are_made_in_their_dtype_and_used(name):
    model = from_shape(SHAPES[name].make(), torch.bfloat16, torch.device("cpu"))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert not model.training
    for key, parameter in model.named_parameters():
        if parameter.ndim > 1:
            assert 0.01 < parameter.float().std() < 0.03, key
        else:
            assert parameter.unique().tolist() == [1.0 if key.endswith("weight") else 0.0], key
    logits = model(input_ids=torch.arange(6).view(2, 3)).logits
    assert torch.isfinite(logits).all() and logits.std() > 0


def test_the_head_of_an_opt_shape_is_tied():
    model = from_shape(SHAPES["tiny"].make(), torch.float32, torch.device("cpu"))
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_lengths_follow_the_table():
    drawn = Settings(batch=16, length="rte").lengths()
    assert drawn == Settings(batch=16, length="rte").lengths() != sorted(drawn)
    assert set(drawn) <= set(LENGTHS["rte"]) and 75 < sum(drawn) / 16 < 90
    assert Settings(batch=3, length="7").lengths() == [7, 7, 7]


@torch.no_grad()
def test_all_losses_are_one():
    work = Work(Settings(model="tiny", dtype="float64", batch=5, length="rte"))
    expected = float(work.stock_loss(work.model)())
    assert float(work.needed_loss(work.model)()) == pytest.approx(expected, rel=1e-12)
    assert float(work.closure(work.model)()) == pytest.approx(expected, rel=1e-12)
    alone = []
    for ids, mask in zip(work.inputs["input_ids"], work.inputs["attention_mask"], strict=True):
        row = ids[: int(mask.sum())]
        logits = work.model(input_ids=row.unsqueeze(0)).logits[0, -1]
        alone.append(-logits.log_softmax(-1)[row[0]])
    assert float(torch.stack(alone).mean()) == pytest.approx(expected, rel=1e-12)


def test_a_twin_shares_weights_and_no_hooks():
    work = Work(TINY)
    first, second = work.twin(), work.twin()
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert a is b
    assert not {id(module) for module in first.modules()} & {id(module) for module in second.modules()}
    called = []
    next(iter(first.model.decoder.layers)).register_forward_hook(lambda *_: called.append(1))
    work.stock_loss(second)()
    work.stock_loss(work.model)()
    assert not called
    work.stock_loss(first)()
    assert called


def test_nothing_of_a_method_is_left_on_the_stock_model():
    work = Work(TINY)
    entry = make_case("tezo", work)
    entry.run()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in work.model.modules())
    assert entry.trained == sum(p.numel() for n, p in work.model.named_parameters() if "layers" in n and p.ndim == 2)


class Recorder(Case):
    """Writes down when it runs."""

    def __init__(self, label, log, interval=None, seconds=0.0):
        super().__init__(label, interval=interval)
        self.log, self.seconds = log, seconds

    def run(self):
        self.log.append(self.label)
        time.sleep(self.seconds)

    def run_refresh(self):
        self.log.append(self.label + "!")


def recorded(settings, log, seconds=0.0, **more):
    timed = [Timed(Recorder(label, log, 10 if label == "c" else None, seconds)) for label in "abc"]
    run_rounds(timed, settings, lambda: None, time.perf_counter(), **more)
    return timed


def test_everything_has_its_turn_in_a_round_and_the_order_turns():
    log = []
    recorded(Settings(rounds=REFRESH_EVERY + 1, warmup=1), log, most_repeats=1)
    assert "".join(log) == "abc" + "abcc!" + "bca" + "cab" + "abcc!"


@pytest.mark.parametrize(("seconds", "repeats"), [(0.0, REPEATS), (0.04, 2), (0.2, 1)])
def test_the_quick_run_several_times_a_round_and_count_with_their_median(monkeypatch, seconds, repeats):
    monkeypatch.setattr("tezo_studies.bench.step_time.PATIENCE", 0.1)
    log = []
    timed = recorded(Settings(rounds=1, warmup=1), log, seconds)
    assert [entry.repeats for entry in timed] == [repeats] * 3
    assert "".join(log) == "abc" + "a" * repeats + "b" * repeats + "c" * repeats + "c!"
    clock = iter([3.0, 1.0, 2.0, 9.0, 2.0])
    monkeypatch.setattr("tezo_studies.bench.step_time._clock", lambda *_: next(clock))
    entry = Timed(Recorder("a", []), repeats=5)
    run_rounds([entry], Settings(rounds=1, warmup=0), lambda: None, 0.0)
    assert entry.rounds == [2.0]


def test_time_that_is_up_ends_rounds_after_three():
    log = []
    timed = recorded(Settings(rounds=50, warmup=0, seconds=1e-9), log)
    assert len(timed[0].rounds) == 3
    timed = recorded(Settings(rounds=8, warmup=0, seconds=100), log)
    assert len(timed[0].rounds) == 8


def test_a_step_with_lazy_factors_is_the_mean_over_their_interval():
    entry = Timed(Recorder("c", [], interval=10), rounds=[1.0, 2.0], refreshes=[11.0, 31.0])
    assert entry.steps() == [(9 * 1 + 21) / 10, (9 * 2 + 21) / 10]
    assert Timed(Recorder("a", []), rounds=[1.0]).steps() == [1.0]


def test_ratios_are_medians_of_the_ratios_of_rounds():
    times = {"F2": [1, 2, 4], "N2": [1, 1, 1], "J2": [1, 2, 2], "tezo": [1, 4, 6], "published:tezo": [3, 4, 6]}
    made = {row["label"]: row for row in step_rows([Timed(Recorder(k, []), rounds=v) for k, v in times.items()])}
    assert made["tezo"]["to_F2"] == 1.5 and made["tezo"]["to_N2"] == 4 and made["tezo"]["speed_up"] == 1
    assert made["tezo"]["to_J2"] == 2
    assert made["tezo"]["seconds"] == {"median": 4, "min": 1, "q1": 2.5, "q3": 5}
    assert made["published:tezo"]["speed_up"] is None


@pytest.mark.parametrize("label", ["lozo", "subzo", "published:lozo", "published:subzo"])
def test_a_refresh_renews_factors_and_a_plain_step_does_not(label):
    work = Work(TINY)
    entry = make_case(label, work)
    published = label.startswith("published")
    counted = entry._algorithm if published else entry._optimizer

    def factor():
        if published:
            return next(state["v"] for state in entry._algorithm.state.values())
        return next(moving.change.v_NR for moving in entry._optimizer.parameters.values())

    entry.run()
    first = factor()
    for step in range(3):
        entry.run()
        assert counted.num_steps == step + 2
        assert torch.equal(factor(), first)
    entry.run_refresh()
    assert counted.num_steps == entry.interval + 1
    second = factor()
    assert not torch.equal(second, first)
    entry.run()
    assert torch.equal(factor(), second)
    counted.num_steps = 2 * entry.interval
    entry.run()
    assert counted.num_steps == entry.interval + 2
    assert torch.equal(factor(), second)
    entry.close()


@pytest.mark.parametrize(("steps", "refresh", "plain"), [(0, 0, 0), (1, 10, 1), (10, 10, 1), (11, 20, 11)])
def test_where_an_interval_is_entered(steps, refresh, plain):
    class Stepper:
        num_steps = steps

    one, other = Stepper(), Stepper()
    to_refresh(one, 10)
    past_refresh(other, 10)
    assert (one.num_steps, other.num_steps) == (refresh, plain)


@pytest.mark.parametrize("label", ["tezo", "published:tezo"])
def test_what_is_held_is_the_factors_and_little_else(label):
    work = Work(TINY)
    entry = make_case(label, work)
    entry.run()
    sides = [sum(p.shape) for n, p in work.model.named_parameters() if "layers" in n and p.ndim == 2]
    factors = 4 * TINY.rank * sum(sides)
    assert factors <= entry.state_bytes() <= factors + 4 * 8 * TINY.rank * len(sides)
    entry.close()


def test_directions_of_each_example_are_timed_beside_the_shared_ones():
    result = measure_step(TINY, ["tezo", "per-example:tezo"])
    shared, each = result["rows"][-2:]
    assert shared["to_shared"] is None
    ratios = [a / b for a, b in zip(each["rounds"], shared["rounds"], strict=True)]
    assert each["to_shared"] == pytest.approx(sum(ratios) / 2, abs=1e-4), "the median of two"
    entry = make_case("per-example:tezo", Work(TINY))
    entry.run()
    assert len(entry._optimizer.last_step.probes) == TINY.batch
    entry.close()
    with pytest.raises(RequestError, match="cannot have at bounded memory"):
        make_case("per-example:mezo", Work(TINY))


def test_moments_of_the_weights_shape_are_held():
    work = Work(TINY)
    entry = make_case("mezo-adam", work)
    entry.run()
    assert entry.state_bytes() >= 2 * 4 * entry.trained
    assert make_case("F2", work).state_bytes() == 0


def test_what_is_measured_is_what_was_asked_for():
    assert entries(["tezo", "tezo-cadam"], published=True) == ["tezo", "published:tezo", "tezo-cadam"]
    assert entries(["tezo", "published:mezo", "tezo"], published=False) == ["tezo", "published:mezo"]
    assert entries(["tezo", "per-example:tezo"], published=False) == ["tezo", "per-example:tezo"]
    with pytest.raises(RequestError, match="mezo-adm"):
        entries(["per-example:mezo-adm"], published=False)
    with pytest.raises(RequestError, match="tezo-cadam has no published form"):
        entries(["published:tezo-cadam"], published=False)


def test_a_measured_step_has_all_its_figures():
    told = []
    result = measure_step(TINY, ["tezo", "published:tezo", "lozo"], told.append)
    assert [row["label"] for row in result["rows"]] == ["F2", "N2", "J2", "tezo", "published:tezo", "lozo"]
    assert result["rounds"] == 2 and result["settings"]["lengths"] == TINY.lengths()
    assert result["versions"]["torch"] and result["hardware"] and result["threads"] == torch.get_num_threads()
    for row in result["rows"]:
        assert row["to_F2"] > 0 and row["to_N2"] > 0 and len(row["rounds"]) == 2
        assert 0 < row["seconds"]["min"] <= row["seconds"]["median"]
    lozo = result["rows"][-1]
    assert lozo["interval"] == 100 and len(lozo["plain"]) == 2 and len(lozo["refreshes"]) == 1
    assert any("warm-up: F2" in text for text in told)


def test_peaks_over_inference_are_differences_of_medians():
    runs = {"F": [100, 120, 110], "N": [90, 90, 90], "tezo": [140, 130, 160]}
    held = {"F": 0, "N": 0, "tezo": 20}
    found = {k: [{"peak": p, "held": held[k], "peak_reset": True} for p in v] for k, v in runs.items()}
    row = rows(found, 1000)[-1]
    assert row["over_F"] == {"bytes": 30, "ratio": 1.2727, "percent": 3.0, "percent_less_held": 1.0}
    assert row["over_N"]["bytes"] == 50 and row["peak"]["median"] == 140


def test_operations_are_counted_and_views_and_memory_are_not():
    x = torch.ones(4, 8)

    def run():
        y = torch.nn.functional.linear(x, x)  # one product; its transpose is a view
        y = y.view(-1)[:4] + 1
        torch.empty(3).mul_(y[0].expand(3))

    assert count_launches(run, torch.device("cpu")) == {"operations": 3}


def test_the_launches_of_both_signs_in_one_pass_are_those_of_one_pass():
    work = Work(Settings(model="narrow-llama-7b", batch=2, length="4", rank=4))
    counts = {label: count_launches(make_case(label, work).run, work.device)["operations"] for label in ("N", "J2")}
    assert 1 <= counts["J2"] / counts["N"] < 1.1


@pytest.mark.parametrize(("label", "rows"), [("tezo", [4, 4]), ("one-pass:tezo", [8])])
def test_both_signs_share_a_pass_where_a_case_says_so(label, rows):
    work = Work(Settings(model="tiny", batch=4, length="200", rank=4))
    case, seen = make_case(label, work), []
    case.run()
    case._model.register_forward_hook(lambda *called: seen.append(len(called[-1].logits)))
    case.run()
    case.close()
    assert seen == rows
