"""Models: loading, quantization, placement, PEFT adapters, and export as exact LoRA adapters.

The interface is `load_model` and the functions that save the result of a run. This package may import optim and the
packages before it.
"""

from tezo.system.progress import quiet_imports

quiet_imports()
