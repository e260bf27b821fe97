"""Answers: which count as right, where one ends, and what demonstrations and calibration change."""

import json

import pytest
import torch
from folders import bpe_tokenizer, refused, tezo, tiny_model, tokenizer_for
from task_folders import form_of, models_and_tasks, rows_of
from zoo import zoo_model

from tezo.system.errors import RequestError
from tezo.tasks.catalogue import example_row
from tezo.tasks.evaluation import evaluate, option_scores, predict
from tezo.tasks.examples import Example, Row, squad
from tezo.tasks.objectives.causal import CausalObjective
from tezo.tasks.wordings import Demonstrated


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return models_and_tasks(tmp_path_factory.mktemp("home"))


def test_any_right_option_counts_and_the_references_measure_its_name():
    tokenizer = bpe_tokenizer()
    model = tiny_model("opt", len(tokenizer))
    objective = CausalObjective(tokenizer, torch.device("cpu"), 100, ())
    options, names = (" good", " bad", " a film"), ("Good", "Bad", "A film")
    asked = Example("It was", " good", options, 0, "a line", names=names)
    (best,) = predict(model, objective, [objective.encode(asked)], 1, 0)
    right = names.index(best)
    other = (right + 1) % 3
    for indices, hit in (((other, right), 1.0), ((other,), 0.0)):
        references = tuple(names[i] for i in indices)
        example = Example(
            "It was", options[other], options, other, "", names=names, right=indices, references=references
        )
        found = evaluate(model, objective, [objective.encode(example)], 1, measures=(squad,))[0]
        assert (found["accuracy"], found["exact_match"]) == (hit, hit)


def test_an_answer_in_free_text_ends_with_its_line():
    tokenizer = bpe_tokenizer()
    model = tiny_model("opt", len(tokenizer), tie_word_embeddings=False)
    line_end = tokenizer("\n", add_special_tokens=False)["input_ids"][0]
    objective = CausalObjective(tokenizer, torch.device("cpu"), 100, ())

    with torch.no_grad():  # close behind the best token: it is chosen now and then
        model.lm_head.weight[line_end] = model.lm_head.weight[5:].mean(0) + 0.5 * torch.randn(
            16, generator=torch.manual_seed(3)
        )
    prompts = ("It was a film", "the meal was cold", "my", "ask the waiter", "we buy bread")
    examples = [objective.encode(Example(prompt, "", (), None, "", ends=False)) for prompt in prompts]
    # the model's own, which an answer does not go by
    own = {"repetition_penalty": 5.0, "no_repeat_ngram_size": 1, "num_beams": 2, "min_length": 40}
    more = {"encoder_repetition_penalty": 3.0, "exponential_decay_length_penalty": (1, 9.0), "stop_strings": ["a"]}
    model.generation_config.update(**own, **more, max_time=1e-4, return_dict_in_generate=True, output_scores=True)
    kept = model.generation_config.to_dict()
    whole = [tokenizer.decode(continued(model, e.sequences[0], 12)) for e in examples]
    assert any("\n" in text for text in whole)
    assert predict(model, objective, examples, 2, 12) == [text.partition("\n")[0].strip() for text in whole]
    assert model.generation_config.to_dict() == kept


@pytest.mark.parametrize("family", ["recurrent_gemma", "bart", "mamba", "gpt2"])
def test_an_answer_does_not_depend_on_the_prompts_beside_it(family):
    tokenizer = tokenizer_for("llama")
    objective = CausalObjective(tokenizer, torch.device("cpu"), 60, ())
    prompts = ["the film " + "was a good song " * count for count in (0, 1, 2, 1)]
    examples = [objective.encode(Example(prompt, "", (), None, "")) for prompt in prompts]
    layers = 3  # RecurrentGemma attends in the third
    model = zoo_model(f"causal-{family}", num_hidden_layers=layers, tie_word_embeddings=False)
    assert predict(model, objective, examples, 1, 5) == predict(model, objective, examples, 4, 5)


@torch.no_grad()
def continued(model, ids: tuple[int, ...], count: int) -> list[int]:
    """The likeliest token, `count` times."""
    found = list(ids)
    for _ in range(count):
        found.append(int(model(input_ids=torch.tensor([found])).logits[0, -1].argmax()))
    return found[len(ids) :]


# In-context learning, calibration


def test_demonstrations_come_before_the_question_solved_and_drawn_anew_for_each_row():
    inner = form_of("rte", "causal")
    pool = [Row({**example_row("rte").fields, "premise": f"Premise {i}.", "label": i % 2}, f"p{i}") for i in range(9)]
    form = Demonstrated(inner, pool, 3, seed=0)
    for row in pool:
        *shown, asked = form.example(row).prompt.split("\n\n")
        assert asked == inner.example(row).prompt
        solved = {(inner.example(other).prompt + inner.example(other).answer).strip() for other in pool if other != row}
        assert len(set(shown)) == 3 and set(shown) <= solved
    assert len({form.example(row).prompt.rpartition("\n\n")[0] for row in pool}) > 5
    with pytest.raises(RequestError, match=r"shots is 9, but there are 8 other rows"):
        Demonstrated(inner, pool, 9, seed=0).example(pool[0])


def test_calibrated_scores_are_what_the_rows_own_text_adds():
    tokenizer = bpe_tokenizer()
    model = tiny_model("opt", len(tokenizer))
    objective = CausalObjective(tokenizer, torch.device("cpu"), 150, ())
    rows = [Row(fields, "here") for fields in rows_of("copa", 3)]
    encoded = [objective.encode(form_of("copa", "causal").example(row)) for row in rows]
    nulls = [objective.encode(Example(" because", "", e.example.options, None, "")) for e in encoded]

    def whole(e) -> list[float]:
        return [option_log_prob(model, e.sequences[i], e.answers[i]) for i in range(len(e.sequences))]

    found = option_scores(model, objective, encoded, 2, calibrate=True)
    for scores, e, null in zip(found, encoded, nulls, strict=True):
        expected = [a - b for a, b in zip(whole(e), whole(null), strict=True)]
        assert scores.tolist() == pytest.approx(expected, abs=1e-4)
    sst2 = form_of("sst2", "causal").example(example_row("sst2"))
    assert sst2.null == " It was"


@torch.no_grad()
def option_log_prob(model, sequence: tuple[int, ...], answer: int) -> float:
    log_probs = model(input_ids=torch.tensor([sequence])).logits[0].double().log_softmax(-1)
    start = len(sequence) - answer
    return sum(float(log_probs[place - 1, sequence[place]]) for place in range(start, len(sequence)))


def test_shots_and_calibration_by_the_command_line(home):
    always = ("eval", home / "causal", "--data-dir", home / "data", "--json")
    found = {}
    for flags in ((), ("--shots", 2), ("--calibrate",)):
        done = tezo(*always, "--task", "sst2", *flags)
        assert done.code == 0, done.err
        found[flags] = json.loads(done.out)["loss"]
    assert len(set(found.values())) == 3
    refused(tezo(*always, "--task", "sst2", "--shots", 40), "shots is 40", "lower")
    masked = ("eval", home / "masked", "--data-dir", home / "data", "--task", "sst2")
    refused(tezo(*masked, "--shots", 2), "shots is 2", "masked")
    refused(tezo(*masked, "--calibrate"), "calibrate", "causal")
