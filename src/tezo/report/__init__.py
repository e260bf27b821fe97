"""One HTML page about runs: results, curves, settings and the command that repeats each."""
