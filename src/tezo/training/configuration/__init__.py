"""The configuration of a run: a recipe and the settings over it, parsed and checked.

It gives `read_config` and `Config`, with the open settings still open. May import no other package of training.
"""
