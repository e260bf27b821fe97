"""Other libraries' training loops: callbacks of transformers' Trainer in a run, and a method in Trainer and TRL's SFT.

Nothing is imported here: `tezo.TezoTrainer` and `tezo.TezoSFTTrainer` import what they need when they are first used.
"""
