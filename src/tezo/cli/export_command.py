"""`tezo export`."""

from pathlib import Path
from typing import Annotated

import typer

from tezo.cli.common import BaseOption, JsonOption, TrustOption, print_json, showing_work


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("export")(export)


@showing_work()
def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run folder.")],
    output: Annotated[Path, typer.Option(help="Folder to write, new.")],
    form: Annotated[
        str, typer.Option("--format", help="lora (for PEFT and vLLM), gguf-lora (for llama.cpp) or merged.")
    ] = "lora",
    model: BaseOption = None,
    trust_remote_code: bool = TrustOption,
    json: bool = JsonOption,
) -> None:
    """Write a run's result elsewhere: its LoRA adapter, or the whole model with everything merged in."""
    from tezo.models.gguf_lora import GGUF_FILE
    from tezo.models.padded_rank import ALLOWED_RANKS
    from tezo.training.finished_runs.exporting import GGUF, export_run

    rank = export_run(Path(run), output, form, model=model, trust_remote_code=trust_remote_code)
    if json:
        print_json({"format": form, "folder": str(output), "rank": rank})
        return
    if rank is not None and rank <= ALLOWED_RANKS[-1]:
        print(f"vLLM: --enable-lora --max-lora-rank {rank} --lora-modules tuned={output}")
    elif rank is not None:
        print(f"vLLM does not take it: its rank is {rank}, above {ALLOWED_RANKS[-1]}; use --format merged")
    if form == GGUF:
        print(f"llama.cpp: --lora {output / GGUF_FILE}")
    print(f"{form}: {output}")
