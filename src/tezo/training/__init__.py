"""One run from its configuration to its result, in six packages; it gives `train`, `open_run` and `Config`.

In the order in which they import: `configuration` (what the user asks for), `preparation` (all that a run needs, before
anything is written), `execution` (the run), `integrations` (other libraries' training loops and trackers),
`finished_runs` (a result opened again), `forecasts` (what a run would take). May import runs and what that may import.
"""
