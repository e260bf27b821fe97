"""Other libraries' training loops and trackers: a method in Trainer and TRL's SFT, and their callbacks in a run.

Nothing is imported here: `tezo.TezoTrainer` and `tezo.TezoSFTTrainer` import what they need when they are first used.
May import execution and what that may import.
"""
