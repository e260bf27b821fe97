"""Rows, prompts and label words, the paper's sixteen tasks, and the objectives that score a model on them."""
