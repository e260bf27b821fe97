"""One run from its configuration to its result: configuration, job, loop, schedules, listeners, processes, replay.

It gives `train`, `open_run` and `Config`. May import runs and what that may import.
"""
