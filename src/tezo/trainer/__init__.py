"""A method in transformers' Trainer and in TRL's SFTTrainer, and transformers' callbacks in a run."""
