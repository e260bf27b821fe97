"""The commands by which other programs use the result of a run."""

from pathlib import Path
from shlex import quote
from typing import Any

from tezo.models.gguf import is_gguf
from tezo.models.loading import EMBEDDED, embedded_source
from tezo.models.lora import next_allowed


def uses(summary: dict[str, Any], output: Path) -> list[tuple[str, str]]:
    """Returns (program, command) for an adapter of this library; none for other results.

    Args:
        summary: of the run.
        output: its folder.
    """
    made, base = summary["result"], str(summary["model"])
    if made["kind"] != "adapter":
        return []
    found, folder = [], output / made["folder"]
    file = embedded_source(base) if base in EMBEDDED else base
    if "engine_file" in made:
        found.append(
            ("llama.cpp", f"llama-server -m {quote(str(file))} --lora {quote(str(folder / made['engine_file']))}")
        )
    if is_gguf(file):
        whole = f"tezo export {quote(str(output))} --format gguf --output FOLDER"
        found.append(("Ollama", f"{whole} && ollama create NAME -f FOLDER/Modelfile"))
    if made.get("in_vllm"):
        lora = f"--enable-lora --max-lora-rank {next_allowed(made['rank'])} --lora-modules tuned={quote(str(folder))}"
        found.append(("vLLM", f"vllm serve {quote(base)} {lora}"))
    return found
