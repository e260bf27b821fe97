"""transformers' Trainer by forward passes alone."""

from tezo.training.integrations.forward_pass_trainer import ForwardPassTrainer


class TezoTrainer(ForwardPassTrainer):
    """transformers' Trainer with a zeroth-order method: `TezoTrainer(model, args, method="lozo-adam", ...)`.

    See `ForwardPassTrainer` for the arguments, and docs/trainer.md.
    """
