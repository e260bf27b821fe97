"""Scoring a four-option task: all options of many rows at once and sharing their prompt, against one option at a time.

    python benchmarks/evaluation.py [--model opt-125m] [--rows 16] [--prompt 96] [--option 4] [--rounds 3] [--json FILE]

Random tokens and weights: only the time means something. One option at a time, one row at a time, is how the public
code of the field evaluates. The two ways must give the same scores.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from tezo_studies.bench.shapes import build_model
from tezo_studies.bench.workload import NoWords

from tezo.runs.environment import hardware, versions
from tezo.tasks.evaluation import evaluate
from tezo.tasks.examples import Example
from tezo.tasks.objectives.causal import CausalObjective
from tezo.tasks.objectives.objective import Encoded

OPTIONS = 4


def main() -> None:
    """Times both ways, interleaved, and prints them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="opt-125m")
    for name, default in (("rows", 16), ("prompt", 96), ("option", 4), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    cpu = torch.device("cpu")
    model = build_model(arguments.model, "float32", cpu)
    encoded = random_rows(arguments.rows, arguments.prompt, arguments.option, int(model.config.vocab_size))
    objective = CausalObjective(NoWords(), cpu, 2048, [str(i) for i in range(OPTIONS)])
    objective.adapt(model, encoded)
    together, apart, loss = [], [], []
    for _ in range(arguments.rounds):
        started = time.perf_counter()
        loss.append(evaluate(model, objective, encoded, arguments.rows)[0]["loss"])
        between = time.perf_counter()
        loss.append(one_option_at_a_time(model, objective, encoded))
        together.append(between - started)
        apart.append(time.perf_counter() - between)
    assert max(loss) - min(loss) < 1e-3 * max(loss), loss
    result = vars(arguments) | {
        "options": OPTIONS,
        "packed": objective.packs,
        "seconds_together": together,
        "seconds_one_at_a_time": apart,
        "speed_up": round(statistics.median(a / b for a, b in zip(apart, together, strict=True)), 2),
        "hardware": hardware(),
        "versions": versions(),
    }
    result.pop("json")
    print(json.dumps(result, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


def random_rows(rows: int, prompt: int, option: int, vocabulary: int) -> list[Encoded]:
    """Rows of random tokens, of four options each; lengths vary by a quarter."""
    draw = torch.Generator().manual_seed(0)
    made = []
    for i in range(rows):
        length = int(prompt * (0.75 + 0.5 * i / max(1, rows - 1)))
        shared = torch.randint(4, vocabulary, (length,), generator=draw).tolist()
        answers = torch.randint(4, vocabulary, (OPTIONS, option), generator=draw).tolist()
        sequences = tuple(tuple(shared + answer) for answer in answers)
        example = Example("", "", tuple("abcd"), i % OPTIONS, "the benchmark")
        made.append(Encoded(sequences, (option,) * OPTIONS, example))
    return made


@torch.no_grad()
def one_option_at_a_time(model: torch.nn.Module, objective: CausalObjective, encoded: list[Encoded]) -> float:
    """The mean loss, from a forward pass with all logits for every option of every row."""
    losses = []
    for e in encoded:
        scores = []
        for sequence, answer in zip(e.sequences, e.answers, strict=True):
            logits = model(input_ids=torch.tensor([sequence])).logits[0].log_softmax(-1)
            positions, tokens = objective.asked(sequence, answer)
            scores.append(logits[positions, tokens].mean())
        losses.append(torch.nn.functional.cross_entropy(torch.stack(scores), torch.tensor(e.example.label)))
    return float(torch.stack(losses).mean())


if __name__ == "__main__":
    main()
