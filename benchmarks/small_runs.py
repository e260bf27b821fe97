"""Runs on small models and real rows, many side by side: what `first_runs.py` and `learning_rates.py` are made of.

Models: a pretrained LLaMA decoder of 260K parameters, the embedded sentence encoder (22M), and a tiny OPT and a tiny
RoBERTa that are pretrained here, for a few hundred steps, on the texts of the same data sets.
"""

import argparse
import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tezo_studies.bench.result_files import commit, processor

from tezo.methods import METHODS
from tezo.runs.environment import versions

LABELLED = {"data.num_train": 160, "data.num_dev": 64, "data.num_test": 64}
"""Rows of a task: few, as a first run has them."""
WHAT = ("model", "data", "method", "seed", "asked_lr")
"""What a run is; `asked_lr` is None for the default."""
Job = tuple[dict[str, Any], Mapping[str, Any]]
"""(what a run is, its settings)."""
VOCABULARY, WIDTH, LENGTH = 1000, 64, 32
PRETRAINING_STEPS, PRETRAINING_ROWS = 300, 24
LABEL_WORDS = [f" {word}" for word in ("terrible", "great", "Yes", "No", "Description", "Entity", "Expression", "Human",
                                       "Location", "Number")]  # fmt: skip
"""Words that a masked model needs as single tokens."""


def measured(method: str) -> dict[str, Any]:
    """Settings by which a published method has its rate and scale measured, and a guard, as the default method has."""
    options = METHODS[method].options() if method in METHODS and not METHODS[method].takes_outputs else {}
    wanted = {"lr": "auto", "rho": "auto", "scale": "unit"} | ({"directions": "auto"} if method == "tezo-cadam" else {})
    found = {f"method.{key}": value for key, value in wanted.items() if key in options}
    return found | {"train.guard": True}


def model_name(model: str, shared: Path, made: Path) -> str:
    """Folder or name of a model.

    Args:
        model: decoder, encoder, opt or roberta.
        shared: folder with models/ and data/.
        made: folder of the models that are pretrained here.
    """
    if model == "decoder":
        return str(shared / "models/stories260K")
    return "embedded:all-minilm-l6-v2" if model == "encoder" else str(made / model)


def rows(data: str, shared: Path) -> dict[str, Any]:
    """Settings of the rows: of completions, or of a task."""
    if data == "completions":
        return {f"data.{part}": str(shared / f"data/completions/{part}.jsonl") for part in ("train", "dev", "test")}
    return {"data.task": data, "data.dir": str(shared / "data"), **LABELLED}


def texts(shared: Path) -> list[str]:
    """Texts to pretrain on: training rows alone."""
    found: list[str] = []
    for name, fields in (("completions", ("prompt", "completion")), ("sst2", ("sentence", "text")), ("trec", ("text",)),
                         ("rte", ("premise", "hypothesis"))):  # fmt: skip
        for line in (shared / f"data/{name}/train.jsonl").read_text().splitlines():
            row = json.loads(line)
            found += [str(row[field]) for field in fields if field in row]
    return found


def pretrain(kind: str, folder: Path, shared: Path) -> None:
    """A tiny OPT ("opt") or RoBERTa ("roberta") with a tokenizer of its own, trained on `texts` with AdamW."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if (folder / "config.json").is_file():
        return
    torch.manual_seed(0)
    corpus, special = texts(shared), ["<pad>", "</s>", "<s>", "<unk>", "<mask>"]
    inner = Tokenizer(models.BPE(unk_token="<unk>"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        [*corpus, *LABEL_WORDS * 100],
        trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet),
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="</s>", bos_token="<s>", unk_token="<unk>",
        mask_token="<mask>", model_max_length=120,
    )  # fmt: skip
    sizes = {"vocab_size": len(tokenizer), "hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 4,
             "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}  # fmt: skip
    if kind == "opt":
        config: Any = transformers.OPTConfig(ffn_dim=4 * WIDTH, word_embed_proj_dim=WIDTH, dropout=0.0,
                                             max_position_embeddings=128, **sizes)  # fmt: skip
        model: Any = transformers.OPTForCausalLM(config)
    else:
        config = transformers.RobertaConfig(intermediate_size=4 * WIDTH, max_position_embeddings=128, **sizes)
        model = transformers.RobertaForMaskedLM(config)
    ids = tokenizer(corpus, truncation=True, max_length=LENGTH, padding="max_length", return_tensors="pt").input_ids
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model.train()
    for _ in range(PRETRAINING_STEPS):
        batch = ids[torch.randint(len(ids), (PRETRAINING_ROWS,))]
        hidden = torch.rand(batch.shape) < 0.15
        inputs = batch if kind == "opt" else batch.masked_fill(hidden & (batch != 0), 4)
        labels = batch.masked_fill(batch == 0, -100) if kind == "opt" else batch.masked_fill(inputs != 4, -100)
        loss = model(input_ids=inputs, attention_mask=(batch != 0).long(), labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def run(job: Job) -> dict[str, Any]:
    """What the run is, and how it ended. In a process with one thread."""
    import torch

    from tezo.system.errors import TezoError
    from tezo.system.progress import quiet_libraries
    from tezo.training.loop import train
    from tezo.training.settings import read_config

    torch.set_num_threads(1)
    quiet_libraries()
    entry, settings = job
    with tempfile.TemporaryDirectory() as folder:
        try:
            summary = train(read_config(None, list(settings.items())), Path(folder) / "run")
            lr = read_config(Path(folder) / "run/config.yaml", []).method.options["lr"]
        except TezoError as error:
            return entry | {"error": str(error)}
    keys = ("dev_loss_before", "dev_loss", "before", "after", "steps", "kept_step", "num_forward_passes", "rollbacks",
            "stopped", "verdict", "seconds_stepping")  # fmt: skip
    return entry | {"lr": lr, **{key: summary[key] for key in keys}}


def command(
    description: str | None, name: str, jobs: Callable[[Path, Path], Iterable[Job]], made: Iterable[str], **head: Any
) -> None:
    """The command line of a benchmark: pretrains, and runs what its result file does not have.

    Args:
        description: of the benchmark.
        name: of its script and its result file.
        jobs: (folder with models/ and data/, folder of the models made here) -> all runs.
        made: the models that are pretrained here.
        head: what the file has beside "runs" and the circumstances.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, required=True, help="folder with models/ and data/")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    head |= {
        "command": f"python benchmarks/{name}.py --shared FOLDER",
        "hardware": f"{processor()}, one thread for each run",
        "versions": versions(("tezo", "torch", "transformers")),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        for kind in made:
            pretrain(kind, Path(folder) / kind, given.shared)
        run_all(jobs(given.shared, Path(folder)), given.out / f"{name}.json", head, given.workers)


def run_all(jobs: Iterable[Job], path: Path, head: Mapping[str, Any], workers: int) -> None:
    """Runs what the file does not have; writes the file after each, in the order of the jobs. Each names its commit.

    Args:
        jobs: all runs.
        path: JSON file.
        head: what the file has beside "runs".
        workers: processes at a time.
    """
    found: list[dict[str, Any]] = json.loads(path.read_text())["runs"] if path.is_file() else []
    planned = list(jobs)
    order, have, at = [_own(entry) for entry, _ in planned], [_own(entry) for entry in found], commit()
    for entry in _results([job for job in planned if _own(job[0]) not in have], workers):
        if "error" not in entry:
            found.append(entry | {"commit": at})
            found.sort(key=lambda run: order.index(_own(run)))
            path.write_text(json.dumps({**head, "runs": found}, indent=1) + "\n")
        said = {key: entry.get(key) for key in ("lr", "dev_loss_before", "dev_loss", "error")}
        print(len(found), *_own(entry).values(), said, flush=True)


def _own(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: entry[key] for key in WHAT}


def _results(jobs: list[Job], workers: int) -> Iterator[dict[str, Any]]:
    os.environ["OMP_NUM_THREADS"] = "1"
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        yield from pool.imap_unordered(run, jobs)
