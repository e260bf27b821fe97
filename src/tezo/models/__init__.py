"""Models: loaded, quantised, placed, adapted by PEFT, and exported as exact LoRA adapters.

It gives `load_model` and what a run leaves behind. May import optim and what that may import.
"""
