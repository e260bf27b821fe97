"""What a run would take, and what this machine has: memory, time, the steps of a plan; nothing is trained.

It gives `machine_report`, `model_report` and `dry_run`. May import finished_runs and what that may import.
"""
