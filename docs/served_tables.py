"""Tables of what vLLM serves: looks by states (`served_looks.json`), quantised folders (`served_forms.json`)."""

from drawing import grid, machine, read

LINES = {
    "torch": "looks and passes in torch",
    "8 states": "server, states behind 8 blocks",
    "4 states": "server, states behind 4 blocks",
    "packed, 4 states": "server with 4-bit weights, 4 blocks",
    "no states": "server, no states",
}
"""Line of the results -> its name in the table."""
TASKS = {"issues": "titles", "sst2": "SST-2"}


def served_looks() -> str:
    """Test rows before and after each run, its method and seconds; passes for states were not counted when it ran."""
    runs = {}
    for name, run in read("served_looks")["runs"].items():
        task, _, line = name.rpartition(", seed ")[0].split("/")
        runs[task, line] = run
    rows = []
    for (task, line), run in sorted(
        runs.items(), key=lambda own: ([*TASKS].index(own[0][0]), [*LINES].index(own[0][1]))
    ):
        levels = [f"{100 * run[when]['accuracy']:.1f} % / {run[when]['loss']:.3f}" for when in ("before", "after")]
        own = [TASKS[task], LINES[line], f"`{run['method']}`", *levels, f"{run['seconds']:.0f}"]
        rows.append(own)
    table = grid(["96 rows of", "", "method", "untuned", "tuned", "seconds"], rows)
    ran = list(runs.values())
    count = ran[0]["rows"]["train"]
    return (
        f"{table}\nSmolLM2-135M in bfloat16 (torch computes in float32), {count} training rows, one seed, `down_proj` "
        "tuned; accuracy and loss of the test rows. Servers have vLLM 0.32 on one thread, adapters of rank 16, and a "
        "client with the configuration and the tokenizer alone. Seconds were measured beside other work. "
        f"`python benchmarks/served_looks.py`; {machine(ran[0])}.\n"
    )


def served_forms() -> str:
    """Whether each form is served with adapters, its loss before and after a run, and whether torch checked it."""
    forms = read("served_forms")["forms"]
    rows = []
    for form, found in forms.items():
        if not found["served"]:
            rows.append([form, "no: " + found["error"].splitlines()[0].partition(". ")[0], "", ""])
        elif "refused" in found:
            rows.append([form, "yes", f"refused: {found['refused']}", ""])
        else:
            checked = "no" if any("could not be checked" in notice for notice in found["notices"]) else "yes"
            rows.append([form, "yes", f"{found['before']:.3f} -> {found['after']:.3f}", checked])
    table = grid(["form", "served with adapters", "loss", "compared with torch"], rows)
    ran = next(iter(forms.values()))
    packages = ", ".join(f"{name} {version}" for name, version in {**ran["server"], **ran["tools"]}.items())
    return (
        f"{table}\nA tiny random Llama, four steps of `tezo` on 16 labelled rows, loss of these rows. {packages}. "
        f"`python benchmarks/served_forms.py`; {machine(ran)}.\n"
    )


SERVED_TABLES = {"served-looks": served_looks, "served-forms": served_forms}
