"""`tezo export`, `push`, `report` and `replay`: commands on a run folder."""

from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from tezo.cli.common import BaseOption, JsonOption, TrustOption, print_json, showing_work
from tezo.system.errors import RequestError

if TYPE_CHECKING:
    from tezo.training.exporting import WholeFile

MUCH_LOST = 0.5
"""Part of a change that packing may lose without a word on finer types."""


@showing_work()
def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run folder.")],
    output: Annotated[Path, typer.Option(help="Folder to write, new.")],
    form: Annotated[
        str,
        typer.Option(
            "--format", help="lora (PEFT, vLLM), gguf-lora (llama.cpp), merged, or gguf: the whole file of the base."
        ),
    ] = "lora",
    keep_tuned: Annotated[
        str | None, typer.Option(metavar="TYPE", help="Of gguf: type of the changed matrices, such as q8_0.")
    ] = None,
    model: BaseOption = None,
    trust_remote_code: bool = TrustOption,
    json: bool = JsonOption,
) -> None:
    """Write a run's result elsewhere: its LoRA adapter, or the whole model with everything merged in."""
    from tezo.models.gguf import GGUF_FILE
    from tezo.models.lora import ALLOWED_RANKS
    from tezo.training.exporting import GGUF, WHOLE, export_run, export_whole

    if form == WHOLE:
        _say_whole(export_whole(Path(run), output, model=model, keep_tuned=keep_tuned), json=json)
        return
    if keep_tuned is not None:
        raise RequestError(f"--keep-tuned is {keep_tuned}, which is for --format {WHOLE}; leave it out.")
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


def _say_whole(done: "WholeFile", *, json: bool) -> None:
    if json:
        print_json(asdict(done) | {"path": str(done.path)})
        return
    for notice in done.notices:
        typer.echo(f"note: {notice}", err=True)
    print(f"{done.matrices} matrices changed; packing them lost {done.lost:.0%} of the change of one, at most")
    if done.losses is not None:
        before, after = done.losses
        print(f"loss of {done.rows}: {before:.4g} with the adapter, {after:.4g} in the file")
    if done.lost > MUCH_LOST:
        print("for less of a loss, keep the changed matrices in a finer type: --keep-tuned q8_0")
    folder = done.path.parent
    print(f"llama.cpp: llama-server -m {quote(str(done.path))}")
    print(f"Ollama: ollama create NAME -f {quote(str(folder / 'Modelfile'))}")
    print(f"gguf: {folder}")


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
