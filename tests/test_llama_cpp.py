"""Forward passes in llama.cpp: what it tells is what torch computes, and a run is a run like any other."""

import json
import math
import random
from dataclasses import replace

import gguf
import pytest
import torch
from folders import bpe_tokenizer, completion_rows, label_rows, read_jsonl, refused, tezo, train, write_rows
from gguf_files import tiny_llama, write_gguf
from hypothesis import given
from hypothesis import strategies as st
from kills import contents
from safetensors.torch import load_file
from short_runs import stopped

from tezo.directions.outputs import Outputs
from tezo.engines.llama_cpp import engine as llama_cpp
from tezo.engines.llama_cpp.model import Context, LlamaModel
from tezo.engines.llama_cpp.plan import PLACES_AT_ONCE, TOKENS_AT_ONCE, part_of, plan_of
from tezo.forecast.dry_run import dry_run
from tezo.forward.engine import NOTHING, Asked
from tezo.forward.perturbed_parameter import Shift
from tezo.tasks.objectives.batch import plain_tree
from tezo.training.job import prepare
from tezo.training.loop import train as run_config
from tezo.training.resume import replay
from tezo.training.settings import parse_config

engine = pytest.mark.engine


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with tiny.gguf in float32, rows with labels and rows of text."""
    root, tokenizer = tmp_path_factory.mktemp("home"), bpe_tokenizer(chat=True)
    write_gguf(root / "tiny.gguf", tiny_llama(len(tokenizer), max_position_embeddings=2048), tokenizer)
    packed = gguf.GGMLQuantizationType.Q4_1
    write_gguf(root / "packed.gguf", tiny_llama(len(tokenizer)), tokenizer, packed=packed)
    write_rows(root / "labels.jsonl", label_rows(64))
    write_rows(root / "texts.jsonl", completion_rows(24))
    return root


OPTIONS = {
    "gauss-newton": {"num_directions": 20},
    "tezo-cadam": {"lr": 0.05, "num_directions": 2},
    "lozo": {"lr": 1e-3, "frozen_rank": 64},
}


def config(home, name="gauss-newton", rows="labels", model="tiny.gguf", **changes):
    data = {part: str(home / f"{rows}.jsonl") for part in ("train", "dev", "test")}
    options = {"name": name, "rank": 4} | OPTIONS[name]
    made = parse_config(
        {
            "model": {"name": str(home / model), "engine": "llama.cpp"},
            "data": data | ({"label_words": None} if rows == "texts" else {}),
            "method": options,
            "train": {"steps": 4, "batch_size": 12, "eval_every": 2, "checkpoint_every": 2, "log_every": 1},
        }
    )
    return replace(made, train=replace(made.train, **changes))


def in_torch(made):
    return replace(made, model=replace(made.model, engine="torch"))


def unlike(texts, places):
    """(text, position) of each place, but for those that an earlier text has with the same tokens up to it."""
    found = {}
    for i, (text, own) in enumerate(zip(texts, places, strict=True)):
        for place in own:
            found.setdefault(text[: place + 1], (i, place))
    return sorted(found.values())


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=12),
    st.lists(st.integers(0, 1), max_size=40),
    st.randoms(use_true_random=False),
    st.sampled_from(["one", "several", "alone"]),
)
def test_a_plan_computes_each_place_behind_its_own_text_and_no_token_twice(tails, beginning, draw, groups):
    texts = sorted({(*beginning, *tail) for tail in tails})
    texts = [a for a, b in zip(texts, [*texts[1:], ()], strict=True) if b[: len(a)] != a]
    read = [sorted({*draw.choices(range(len(text)), k=2), len(text) - 1}) for text in texts]
    pairs = unlike(texts, read)
    group_T = [draw.randrange(3) for _ in texts] if groups == "several" else None
    plan = plan_of(texts, *zip(*pairs, strict=True), group_T, alone=groups == "alone")
    group_of = list(range(len(texts))) if groups == "alone" else group_T or [0] * len(texts)
    assert sorted(plan.places) == list(range(len(pairs)))
    assert groups != "alone" or all(len(part.texts) == 1 for part in plan.parts)
    places, computed = iter(plan.places), set()
    for part in plan.parts:
        seen = {sequence: [*texts[0][: plan.start]] for sequence in range(64)}
        for piece in part.pieces():
            assert len(piece.token_T) <= TOKENS_AT_ONCE and piece.output_T.sum() <= PLACES_AT_ONCE
            for place in range(len(piece.token_T)):
                token, position = piece.token_T[place], piece.position_T[place]
                sequences = piece.seq_TS[place][: piece.count_T[place]]
                for sequence in sequences:
                    assert len(seen[sequence]) == position
                    seen[sequence].append(token)
                assert len({tuple(seen[sequence]) for sequence in sequences}) == 1
                of_groups = {group_of[piece.texts[sequence]] for sequence in sequences}
                own = (*of_groups, *map(int, seen[sequences[0]]))
                assert len(of_groups) == 1 and own not in computed
                computed.add(own)
                if piece.read_T[place]:
                    text, at = pairs[next(places)]
                    assert own == (group_of[text], *texts[text][: at + 1])
    starts = [(group, text[:n]) for group, text in zip(group_of, texts, strict=True)
              for n in range(plan.start + 1, len(text) + 1)]  # fmt: skip
    assert len(computed) == len(set(starts))


def test_texts_of_any_length_and_number_are_divided():
    texts = sorted({tuple(random.Random(i).choices(range(9), k=40)) for i in range(200)} | {(8,) * 1300})
    pairs = unlike(texts, [range(len(text)) for text in texts])
    plan = plan_of(texts, *zip(*pairs, strict=True))
    assert sorted(plan.places) == list(range(len(pairs))) and max(len(part.token_T) for part in plan.parts) == 1300
    assert all(len(piece.token_T) <= TOKENS_AT_ONCE for part in plan.parts for piece in part.pieces())


def log_probs_of(model, text):
    with torch.no_grad():
        return model(input_ids=torch.tensor([text])).logits[0].log_softmax(-1)


@engine
@pytest.mark.parametrize("rows", ["labels", "texts"])
def test_outputs_of_every_row_are_torchs(home, rows):
    made = config(home, "tezo-cadam", rows=rows)
    jobs = [prepare(made), prepare(in_torch(made))]
    outputs: list[Outputs] = []
    for job in jobs:
        closure = job.objective.closure(job.model, job.batches(range(8)))
        job.optimizer.refresh()
        draw = job.optimizer.draw()
        for name, moving in job.optimizer.parameters.items():  # a state, and a perturbation on top of it
            moving.add_(draw.directions[name][1], slice(None), draw.directions[name][1].coefficient, 0.1)
        for name, moving in job.optimizer.parameters.items():
            moving.set_perturbations([Shift(draw.directions[name][0], 0.1)])
        outputs.append(closure.outputs(outputs[0] if outputs else None))
        for moving in job.optimizer.parameters.values():
            moving.set_perturbations([])
        own = closure.outputs(outputs[0])
        assert (own.scores_TC - outputs[-1].scores_TC).abs().max() > 0.05  # the perturbation is felt
    mine, theirs = outputs
    assert mine.scores_TC.shape == theirs.scores_TC.shape and torch.equal(mine.labels_T, theirs.labels_T)
    assert torch.equal(mine.example_T, theirs.example_T)
    assert (mine.scores_TC - theirs.scores_TC).nan_to_num().abs().max() < 1e-3
    for job in jobs:
        job.optimizer.close()


@engine
def test_long_texts_common_beginnings_and_many_texts_are_read_right(home):
    job = prepare(config(home))
    draw, size = random.Random(0), job.model.config.vocab_size
    beginning = tuple(draw.choices(range(4, size), k=50))
    texts = sorted(
        {(*beginning, *draw.choices(range(4, size), k=draw.randint(1, 30))) for _ in range(90)}
        | {(*beginning, *draw.choices(range(4, size), k=1200))}
    )
    pairs = unlike(texts, [sorted({50, len(t) // 2 + 25, len(t) - 1}) for t in texts])
    tokens_PC = torch.tensor([[7, draw.randrange(size)] for _ in pairs])
    tokens_PC[0, 1] = NOTHING
    asked = Asked(texts, *(torch.tensor(own) for own in zip(*pairs, strict=True)), tokens_PC, likely=3)
    (told,) = job.loaded.engine.log_probs([{}], asked)
    tables = [log_probs_of(job.model, text) for text in texts]
    for place, (text, position) in enumerate(pairs):
        expected = tables[text][position]
        for own, token in zip(told.log_probs_PC[place], tokens_PC[place], strict=True):
            assert abs(float(own) - (0.0 if token == NOTHING else float(expected[token]))) < 1e-3
        assert torch.allclose(expected[told.likely_PL[place]], told.likely_log_probs_PL[place], atol=1e-3)
        assert torch.allclose(expected.topk(3).values, told.likely_log_probs_PL[place], atol=1e-3)
    seen = []
    with job.model.lm_head.register_forward_pre_hook(lambda _, args: seen.append(args[0][0, -1])):
        for text in (texts[3], texts[0][:9], texts[3]):
            log_probs_of(job.model, text)
    hidden = job.loaded.engine.hidden({}, [texts[3], texts[0][:9], texts[3]])
    assert torch.allclose(hidden, torch.stack(seen), atol=1e-3)
    job.optimizer.close()


@engine
@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("gauss-newton", "labels"),
        pytest.param("gauss-newton", "texts", marks=pytest.mark.slow),
        ("tezo-cadam", "labels"),
        pytest.param("lozo", "labels", marks=pytest.mark.slow),
    ],
)
def test_a_run_ends_where_one_in_torch_does(home, tmp_path, name, rows):
    steps = 2 if rows == "texts" else 4  # later rounds find nothing, and rounding says in how many passes
    made = config(home, name, rows, keep_best=False, steps=steps)
    runs = [run_config(own, tmp_path / own.model.engine) for own in (made, in_torch(made))]
    states = [load_file(tmp_path / own / "adapter/adapter_model.safetensors") for own in ("llama.cpp", "torch")]
    changes = [
        torch.cat([(s[n] @ s[n.replace("_B", "_A")]).flatten() for n in sorted(s) if ".lora_B." in n]) for s in states
    ]
    assert changes[1].norm() > 0
    assert (changes[0] - changes[1]).norm() <= 1e-2 * changes[1].norm()
    assert abs(runs[0]["after"]["loss"] - runs[1]["after"]["loss"]) < 1e-3
    assert runs[0]["num_forward_passes"] == runs[1]["num_forward_passes"]


@engine
@pytest.mark.parametrize("model", ["tiny.gguf", pytest.param("packed.gguf", marks=pytest.mark.slow)])
def test_a_run_that_stops_anywhere_goes_on_to_the_bit_and_is_replayed(home, tmp_path, model):
    made = config(home, "tezo-cadam", model=model)
    run_config(made, tmp_path / "whole")
    for step in (0, 2):
        stopped(made, tmp_path / "run", step)
    run_config(made, tmp_path / "run", resume=True)
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")
    replay(tmp_path / "whole", tmp_path / "again")
    kept = "adapter/adapter_model.safetensors"
    assert (tmp_path / "again" / kept).read_bytes() == (tmp_path / "whole" / kept).read_bytes()


@engine
def test_the_result_is_read_by_llama_cpp_itself_with_the_figures_of_the_run(home, tmp_path):
    done = train(home / "packed.gguf", home / "labels.jsonl", tmp_path / "run", "--engine", "llama.cpp",
                 "--test", home / "labels.jsonl", train__keep_best=False)  # fmt: skip
    assert done.code == 0 and "llama.cpp:  llama-server -m" in done.out and "Ollama:  tezo export" in done.out, done.err
    lora = str(tmp_path / "run/adapter/adapter.gguf")
    context = Context(LlamaModel(home / "packed.gguf"), 64)
    few = write_rows(tmp_path / "few.jsonl", label_rows(4))
    summary = tezo("eval", tmp_path / "run", "--data", few, "--json")
    made = config(home, model="packed.gguf")
    job = prepare(replace(made, data=replace(made.data, test=str(few))))
    losses = []
    for encoded in job.test:
        scores = []
        for sequence, answer in zip(encoded.sequences, encoded.answers, strict=True):
            context.forget()
            every = part_of(plain_tree(sequence, range(len(sequence))), 0, [0])
            with context.adapted(lora):
                table = torch.from_numpy(context.logits(every).copy()).log_softmax(-1)
            places = range(len(sequence) - answer, len(sequence))
            scores.append(sum(float(table[p - 1, sequence[p]]) for p in places) / answer)
        losses.append(-float(torch.tensor(scores).log_softmax(0)[encoded.example.label]))
    job.optimizer.close()
    measured = json.loads(summary.out)["loss"]
    assert abs(sum(losses) / len(losses) - measured) < 2e-3


@engine
def test_answers_are_those_that_torch_writes(home, tmp_path):
    texts = write_rows(tmp_path / "rows.jsonl", completion_rows(5, seed=3))
    answers = []
    for name in ("llama.cpp", "torch"):
        run = tmp_path / name
        more = ("--engine", name, "--set", "method.name=lozo", "--set", "data.max_length=40")
        assert train(home / "tiny.gguf", home / "texts.jsonl", run, *more).code == 0
        done = tezo("predict", run, "--input", texts, "--output", run / "answers.jsonl", "--max-new-tokens", 12)
        assert done.code == 0, done.err
        answers.append(read_jsonl(run / "answers.jsonl"))
    assert answers[0] == answers[1] and any(row["prediction"] for row in answers[0])


SCORER = """
def words(prompts, completions, **columns):
    return [len(text.split()) + 0.1 * len(text) for text in completions]
"""


@engine
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_population_writes_and_ends_as_in_torch(home, tmp_path, temperature):
    (tmp_path / "score.py").write_text(SCORER)
    write_rows(tmp_path / "prompts.jsonl", [{"prompt": row["prompt"]} for row in completion_rows(8)])
    method = {"name": "es", "rank": 4, "num_directions": 4, "rho": 0.05}
    train = {"reward": f"{tmp_path / 'score.py'}:words", "steps": 3, "batch_size": 3, "max_new_tokens": 6}
    request = {"data": {"train": str(tmp_path / "prompts.jsonl")}, "method": method,
               "train": train | {"temperature": temperature}}  # fmt: skip
    scored = {}
    for engine in ("llama.cpp", "torch"):
        made = parse_config(request | {"model": {"name": str(home / "tiny.gguf"), "engine": engine}})
        run_config(made, tmp_path / engine)
        scored[engine] = read_jsonl(tmp_path / engine / "scored.jsonl")
    assert len(scored["torch"]) == 3 * 4 * 3 and len({line["completion"] for line in scored["torch"]}) > 4
    assert scored["llama.cpp"] == scored["torch"]
    found = dry_run(parse_config(request | {"model": {"name": str(home / "tiny.gguf"), "engine": "llama.cpp"}}))
    assert found["steps"] == {"population": 3}
    replay(tmp_path / "llama.cpp", tmp_path / "again")


@engine
@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        (
            {"method__name": "mezo", "method__rank": None},
            ["method.name is mezo, model.engine llama.cpp", "cannot be written in place"],
        ),
        ({"method__name": "adam", "method__rank": None}, ["adam"]),
        ({"method__directions": "per-example"}, ["method.directions"]),
        ({"train__feedback_first": 1}, ["train.feedback_first"]),
        ({"model__quantization": "nf4"}, ["model.quantization", "llama.cpp"]),
        ({"model__peft": "lora"}, ["model.peft", "llama.cpp"]),
        ({"model__engine": "lama.cpp"}, ["model.engine", "llama.cpp"]),
        ({"method__targets": "[embed_tokens]"}, ["method.targets"]),
    ],
)
def test_what_llama_cpp_cannot_do_is_one_sentence(home, tmp_path, settings, parts):
    named = {"model__engine": "llama.cpp"} | settings
    refused(train(home / "tiny.gguf", home / "labels.jsonl", tmp_path / "run", **named), *parts)
    assert not (tmp_path / "run").exists()


@engine
def test_a_model_that_is_no_file_and_a_damaged_one_are_one_sentence(home, tmp_path):
    rows = home / "labels.jsonl"
    done = train(home, rows, tmp_path / "run", "--engine", "llama.cpp")
    refused(done, "which reads GGUF files", home)
    broken = tmp_path / "broken.gguf"
    broken.write_bytes((home / "tiny.gguf").read_bytes()[:-4000])
    refused(train(broken, rows, tmp_path / "run", "--engine", "llama.cpp"), "broken.gguf")


@engine
def test_what_the_default_cannot_do_there_is_said_and_replaced(home, tmp_path):
    run, rows = tmp_path / "run", home / "labels.jsonl"
    model, options = home / "tiny.gguf", ("--engine", "llama.cpp")
    refused(train(model, rows, run, *options, steps=100, train__feedback_first=2), "feedback_first is 2, and llama.cpp")
    forecast = train(model, rows, run, *options, "--dry-run", "--json", steps=100)
    assert list(json.loads(forecast.out)["steps"]) == ["two-point"]
    done = train(model, rows, run, *options, steps=100)
    assert done.code == 0, done.err
    for notices in (json.loads((run / "summary.json").read_text())["notices"], json.loads(forecast.out)["notices"]):
        assert "there are no feedback steps: llama.cpp computes no gradient." in notices
        assert any("llama.cpp changes linear layers" in notice for notice in notices)


@engine
def test_nothing_of_an_adapter_is_in_any_folder(home, tmp_path, monkeypatch):
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    job = prepare(config(home))
    with llama_cpp.own_file() as path:
        assert path.startswith("/proc/self/fd/")
    closure = job.objective.closure(job.model, job.batches(range(4)))
    assert math.isfinite(float(job.optimizer.step(closure)))
    assert list((tmp_path / "temporary").iterdir()) == []
    job.optimizer.close()


@engine
def test_a_dry_run_does_not_count_a_model_that_torch_does_not_hold(home):
    found = dry_run(config(home, model="packed.gguf"))
    assert set(found["memory"]) == {"factors", "peak"} and found["passes"] > 0
    assert dry_run(config(home, model="packed.gguf", rows="texts"))["passes"] > 0
    model = ("train", "--model", home / "packed.gguf", "--data", home / "labels.jsonl", "--engine", "llama.cpp")
    assert "the model in llama.cpp, fixed factors" in tezo(*model, "--dry-run").out
