"""Bases: where the fixed factors of low-rank directions come from."""
