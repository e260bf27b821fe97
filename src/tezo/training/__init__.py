"""One run, from its configuration to its result and the report of it, and the same steps in Trainer."""
