"""The libraries below, without their bars and advice."""

import os
from logging import ERROR, getLogger


def quiet_libraries() -> None:
    """Keeps the libraries' own bars and advice off the screen of this process; errors still come through."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from transformers.utils import logging

    for name in ("bitsandbytes", "torchao", "torch.utils._pytree"):  # of every product that it rounds; at import
        getLogger(name).setLevel(ERROR)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
