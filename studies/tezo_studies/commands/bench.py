"""`tezo bench step` and `tezo bench memory`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from tezo.cli.common import print_json
from tezo.system.progress import quiet_libraries

Model = Annotated[
    str, typer.Option(help="Shape with random weights (opt-125m, llama-7b, ...), model folder, or hub name.")
]
Methods = Annotated[
    str,
    typer.Option(
        help="Methods, separated by commas; published:NAME, per-example:NAME, plain-closure:NAME: their forms."
    ),
]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Batch = Annotated[int, typer.Option(help="Rows per batch.")]
Length = Annotated[str, typer.Option(help="Tokens per row, or rte for row lengths like RTE's.")]
Rank = Annotated[int, typer.Option(help="Rank of the low-rank methods.")]
Targets = Annotated[str, typer.Option(help="Tuned parameters: all-linear or all.")]
Rounds = Annotated[int, typer.Option(help="Number of rounds; each measures everything once.")]
Warmup = Annotated[int, typer.Option(help="Warm-up rounds, which are not counted.")]
Seconds = Annotated[float | None, typer.Option(help="Time limit in seconds; at least three rounds are run.")]
WithPublished = Annotated[bool, typer.Option("--published/--no-published", help="Also measure the published forms.")]
Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON; - prints it.")]


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.add_typer(bench, name="bench", help="Measure the time and memory of a step.")


bench = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@bench.command("step")
def step(
    model: Model = "opt-125m",
    methods: Methods = "tezo,tezo-adam,mezo",
    dtype: Dtype = "float32",
    device: Device = "auto",
    batch: Batch = 1,
    length: Length = "32",
    rank: Rank = 32,
    targets: Targets = "all-linear",
    rounds: Rounds = 7,
    warmup: Warmup = 1,
    seconds: Seconds = None,
    published: WithPublished = True,
    json: Json = None,
) -> None:
    """Time a step of each method against two plain forward passes and its published form."""
    named = {"model": model, "dtype": dtype, "device": device, "batch": batch, "length": length, "rank": rank}
    named |= {"targets": targets, "rounds": rounds, "warmup": warmup, "seconds": seconds}
    _run("step", named, methods, published, json)


@bench.command("memory")
def memory(
    model: Model = "opt-125m",
    methods: Methods = "tezo,tezo-adam,mezo",
    dtype: Dtype = "float32",
    device: Device = "auto",
    batch: Batch = 1,
    length: Length = "32",
    rank: Rank = 32,
    targets: Targets = "all-linear",
    rounds: Rounds = 3,
    seconds: Annotated[float | None, typer.Option(help="Time limit in seconds; at least one round is run.")] = None,
    published: WithPublished = True,
    json: Json = None,
) -> None:
    """Measure each method's peak memory against inference: reserved on a GPU, resident in a new process on a CPU."""
    named = {"model": model, "dtype": dtype, "device": device, "batch": batch, "length": length, "rank": rank}
    named |= {"targets": targets, "rounds": rounds, "seconds": seconds}
    _run("memory", named, methods, published, json)


def _run(kind: str, named: dict[str, Any], methods: str, published: bool, json: Path | None) -> None:
    quiet_libraries()
    from tezo.models.loading import choose_device
    from tezo_studies.bench.peak_memory import measure_memory
    from tezo_studies.bench.result_files import check_target, print_table, write_json
    from tezo_studies.bench.settings import Settings, entries
    from tezo_studies.bench.step_time import measure_step

    to_screen = json == Path("-")
    settings = Settings(**named | {"device": str(choose_device(named["device"]))})
    labels = entries([name.strip() for name in methods.split(",") if name.strip()], published=published)
    if not to_screen:
        check_target(json)
    measure = {"step": measure_step, "memory": measure_memory}[kind]
    with _progress() as tell:
        result = measure(settings, labels, tell)
    if to_screen:
        print_json(result)
        return
    print_table(result)
    if json is not None:
        write_json(json, result)
        print(f"written: {json}")


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    # A status line on a terminal; it disappears at the end.
    from rich.console import Console

    console = Console(stderr=True)
    with console.status("building the model") as status:
        yield status.update
