"""`tezo push` through huggingface_hub to a server that answers as the hub does."""

import os
import subprocess
import sys

import peft
import pytest
import transformers
from folders import label_rows, model_folder, tezo, train, write_rows
from hub_server import TOKEN, Hub, hub_server
from test_adapter import close, outputs

from tezo.models.saving import HERE


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("push")
    write_rows(home / "rows.jsonl", label_rows(24))
    base = model_folder(home, "opt")
    for name, method in (("adapted", "tezo"), ("written", "mezo")):
        rank = {"method__rank": 4 if method == "tezo" else None}
        done = train(base, home / "rows.jsonl", home / name, steps=2, method__name=method, **rank)
        assert done.code == 0, done.err
    return home


def push(hub: Hub, *arguments: object, token: str = TOKEN) -> subprocess.CompletedProcess[str]:
    """In a process of its own: huggingface_hub reads the address of the hub when it is imported."""
    own = {"HF_ENDPOINT": hub.url, "HF_TOKEN": token, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-m", "tezo", "push", *map(str, arguments)]
    return subprocess.run(command, env=os.environ | own, capture_output=True, text=True, timeout=120, check=False)


def test_what_is_pushed_is_private_is_loaded_by_peft_and_names_no_folder(home, tmp_path):
    with hub_server() as hub:
        done = push(hub, home / "adapted", "me/routing")
        assert done.returncode == 0 and done.stdout.strip() == f"{hub.url}/me/routing", done.stderr
        assert hub.private["me/routing"] and hub.checked_cards > 0
        files = hub.files["me/routing"]
        assert set(files) == {"README.md", "adapter_config.json", "adapter_model.safetensors", "base.json"}
        assert files["adapter_model.safetensors"] == (home / "adapted/adapter/adapter_model.safetensors").read_bytes()
        assert not [name for name, data in files.items() if str(home).encode() in data or HERE.encode() in data]
        assert b'PeftModel.from_pretrained(model, "me/routing")' in files["README.md"]
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    pulled, own = (
        peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(home / "opt").eval(), folder)
        for folder in (tmp_path, home / "adapted/adapter")
    )
    close(outputs(pulled), outputs(own))
    assert str(home) in (home / "adapted/adapter/adapter_config.json").read_text(), "the run itself is as it was"


@pytest.mark.slow
def test_a_whole_model_has_a_card_too_and_a_repository_that_exists_is_used(home):
    with hub_server() as hub:
        for _ in range(2):
            done = push(hub, home / "written", "me/whole", "--public", "--json")
            assert done.returncode == 0 and f'"{hub.url}/me/whole"' in done.stdout, done.stderr
        assert not hub.private["me/whole"]
        card = hub.files["me/whole"]["README.md"].decode()
    assert "library_name: transformers" in card and 'AutoModelForCausalLM.from_pretrained("me/whole")' in card
    assert str(home) not in card and "## Metrics" in card


@pytest.mark.slow
@pytest.mark.parametrize(
    ("token", "fails_at", "code", "said"),
    [("hf_other", "", 2, "hf auth login"), (TOKEN, "commit", 1, "no space left for you")],
)
def test_what_the_hub_refuses_is_said_in_a_sentence(home, token, fails_at, code, said):
    with hub_server() as hub:
        hub.fails_at = fails_at
        done = push(hub, home / "adapted", "me/routing", token=token)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == code and last.startswith("error: ") and said in last, done.stderr


@pytest.mark.parametrize("name", ["routing", "a/b/c", "me/ro uting", "."])
def test_a_name_that_the_hub_cannot_have_is_refused_at_once(home, name):
    done = tezo("push", home / "adapted", name)
    assert done.code == 2 and "OWNER/NAME" in done.err


def test_a_folder_that_is_no_run_is_refused(home):
    done = tezo("push", home, "me/routing")
    assert done.code == 2 and "is not a run folder" in done.err
