"""Turns off the progress bars and advice of other libraries."""

import os
import warnings
from logging import ERROR, getLogger


def quiet_imports() -> None:
    """Turns off what torchao says at import of the GPU libraries that it cannot load; errors are still shown.

    transformers imports an installed torchao with its first model class, whether or not int8wo is asked for.
    """
    for name in ("torchao", "torch.utils._pytree"):
        getLogger(name).setLevel(ERROR)


def quiet_libraries() -> None:
    """Turns off progress bars and advice of other libraries in this process; errors are still shown."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from transformers.utils import logging

    getLogger("bitsandbytes").setLevel(ERROR)  # it warns at each product that it rounds
    warnings.filterwarnings("ignore", ".is_gradient_checkpointing. is deprecated", FutureWarning)  # PEFT's old name
    getLogger("lm_eval").setLevel(ERROR)  # it advises against a model in memory, which is the point here
    logging.set_verbosity_error()
    logging.disable_progress_bar()
