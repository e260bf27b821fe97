"""Turns off the progress bars and advice of other libraries."""

import os
from logging import ERROR, getLogger


def quiet_libraries() -> None:
    """Turns off progress bars and advice of other libraries in this process; errors are still shown."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from transformers.utils import logging

    # bitsandbytes warns at each product that it rounds, the others at import
    for name in ("bitsandbytes", "torchao", "torch.utils._pytree"):
        getLogger(name).setLevel(ERROR)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
