"""What the documents say is run; what they repeat is up to date; what is public is documented."""

import ast
import importlib
import os
import re
import runpy
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from folders import saved, tiny_model, words_tokenizer
from folders import tezo as tezo_command
from forks import TEZO, forked
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import OPTConfig, OPTForCausalLM, PreTrainedTokenizerFast

import tezo

ROOT = Path(__file__).parents[1]
EXAMPLES_MODEL = "embedded:all-minilm-l6-v2"
MODEL_OF_THE_README = "embedded:smollm2-135m"
BLOCKS = [
    pytest.param(code, id=f"{path.name}-{number}")
    for path in [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), flags=re.S))
]


COMMANDS = [
    pytest.param(commands, id=path.stem)
    for path in sorted(ROOT.glob("docs/*.md"))
    for commands in re.findall(r"```sh\n(.*?)```", path.read_text(encoding="utf-8"), flags=re.S)
]


@pytest.mark.slow
@pytest.mark.parametrize("commands", COMMANDS)
def test_the_commands_of_a_document_run(commands, tmp_path, monkeypatch):
    # The one change: a tiny random model stands in for the one of the example.
    example, stand_in = tmp_path / "examples/routing", str(tiny_encoder_folder(tmp_path / "model"))
    example.mkdir(parents=True)
    for path in (ROOT / "examples/routing").iterdir():
        if path.name == "recipe.yaml":
            (example / path.name).write_text(path.read_text(encoding="utf-8").replace(EXAMPLES_MODEL, stand_in))
        else:
            (example / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    for program, *arguments in map(shlex.split, commands.replace(EXAMPLES_MODEL, stand_in).splitlines()):
        if program == "torchrun":
            number, start = arguments.index("--nproc-per-node"), arguments.index("tezo")
            done = forked(TEZO, *arguments[start + 1 :], ranks=int(arguments[number + 1]))
            assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
        else:
            done = tezo_command(*arguments)
            assert (program, done.code) == ("tezo", 0), done.err


def tiny_encoder_folder(folder: Path) -> Path:
    recipe = (ROOT / "examples/routing/recipe.yaml").read_text(encoding="utf-8")
    tokenizer = words_tokenizer(closing=True, more=re.findall(r"\w+", recipe))
    wide = {"hidden_size": 64, "intermediate_size": 64}  # a CPU unpacks no narrower layers
    return saved(tiny_model("bert", len(tokenizer), **wide), tokenizer, folder)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("commands", COMMANDS)
def test_the_commands_of_a_document_run_on_the_model_that_is_here(commands, tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-e", "-c", commands], cwd=tmp_path, env=os.environ | {"PATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]


LABELS = ("bug", "feature", "question")


@pytest.fixture
def tiny_causal_folder(tmp_path):
    cities = ["Paris", "Rome", "Madrid", "Tokyo", "Cairo", "Lima"]
    known = ["<pad>", "</s>", "<unk>", "tuned", "by", "forward", "passes", "alone", *cities, *LABELS]
    words = {word: i for i, word in enumerate(known)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    fast.save_pretrained(tmp_path / "model")
    config = OPTConfig(
        vocab_size=len(words), hidden_size=32, word_embed_proj_dim=32, ffn_dim=64, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    OPTForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* answers were cut at")  # the random model ends none
@pytest.mark.parametrize("code", BLOCKS)
def test_the_code_of_a_document_runs(code, tiny_causal_folder, tmp_path, monkeypatch):
    # The one change: a tiny random model stands in for the one that would have to be fetched.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for name in ("facebook/opt-125m", MODEL_OF_THE_README):
        code = code.replace(name, str(tiny_causal_folder))
    exec(compile(code, "document", "exec"), {})


def test_each_setting_is_one_row_of_the_settings_with_its_whole_meaning():
    rows = {}
    for line in (ROOT / "docs/settings.md").read_text(encoding="utf-8").splitlines():
        assert not line or line.startswith(("#", "|", "Keys", "`method.name`", "All methods")), line
        if line.startswith("| `"):
            assert line.endswith(" |") and line.count(" | ") in (1, 2), line
            rows[line.split("`")[1]] = line
    assert rows["train.guard"].endswith("else false. |")


def test_rendered_documents_are_up_to_date(monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "docs")
    monkeypatch.setattr(sys, "argv", ["render.py", "--check"])
    assert runpy.run_path(str(ROOT / "docs/render.py"))["main"]() == 0, capsys.readouterr().out


def test_links_between_documents_lead_somewhere():
    for path in [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*/README.md")]:
        for link in re.findall(r"\]\(([^)#:]+)\)", path.read_text(encoding="utf-8")):
            assert (path.parent / link).exists(), f"{path.name}: {link}"


def test_lazy_names_of_the_package_are_those_that_are_typed():
    tree = ast.parse((ROOT / "src/tezo/__init__.py").read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    typed = {alias.asname: node.module for node in block.body for alias in node.names}
    assert typed == tezo._HOMES
    if find_spec("trl") is None:
        del typed["TezoSFTTrainer"]  # of an extra
    assert all(getattr(tezo, name) is getattr(importlib.import_module(home), name) for name, home in typed.items())
