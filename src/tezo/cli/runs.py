"""`tezo export`, `push`, `report` and `replay`: commands on a run folder."""

from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from tezo.cli.common import BaseOption, JsonOption, TrustOption, print_json, showing_work
from tezo.system.errors import RequestError


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
    from tezo.models.gguf import GGUF_FILE
    from tezo.models.lora import ALLOWED_RANKS
    from tezo.training.exporting import GGUF, export_run

    rank = export_run(Path(run), output, form, model=model, trust_remote_code=trust_remote_code)
    if json:
        print_json({"format": form, "folder": str(output), "rank": rank})
        return
    if rank is not None and rank <= ALLOWED_RANKS[-1]:
        print(f"vLLM: --enable-lora --max-lora-rank {rank} --lora-modules tuned={quote(str(output))}")
    elif rank is not None:
        print(f"vLLM does not take it: its rank is {rank}, above {ALLOWED_RANKS[-1]}; use --format merged")
    if form == GGUF:
        print(f"llama.cpp: --lora {quote(str(output / GGUF_FILE))}")
    print(f"{form}: {output}")


@showing_work()
def push(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")],
    name: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="Repository on the hub; it is created if needed.")],
    public: Annotated[bool, typer.Option("--public", help="Let everybody see a repository that is created.")] = False,
    json: bool = JsonOption,
) -> None:
    """Upload a run's adapter, or its model, with a model card to the Hugging Face hub; private unless --public."""
    from tezo.training.exporting import push_run

    url = push_run(run, name, public=public)
    if json:
        print_json({"repository": name, "url": url})
    else:
        print(url)


@showing_work()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, finished or not.")],
    output: Annotated[Path | None, typer.Option(help="HTML file to write.")] = None,
) -> None:
    """Write one HTML page about runs: results, curves, settings and the command that repeats each."""
    if output is None:
        raise RequestError("output is not set; give --output FILE.html for the page.")
    from tezo.report.page import save

    save(runs, output)
    print(output)


@showing_work()
def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder, finished or not.")],
    output: Annotated[Path, typer.Option(help="Folder to create.")],
    step: Annotated[
        int | None, typer.Option(help="Number of steps; default: up to the step that the run kept.")
    ] = None,
    device: Annotated[str, typer.Option(help="Device: auto, cpu or cuda.")] = "auto",
    model: BaseOption = None,
    trust_remote_code: bool = TrustOption,
    json: bool = JsonOption,
) -> None:
    """Rebuild the tuned model from its base and the run's steps.log, without data."""
    from tezo.training.resume import replay as replay_run

    done = replay_run(run, output, step=step, device=device, model=model, trust_remote_code=trust_remote_code)
    if json:
        print_json(done)
        return
    for notice in done["notices"]:
        print(f"note: {notice}")
    print(f"{done['steps']} steps: {output / done['result']['folder']}")
