"""Draws, rounding, scratch memory, digests and products: arithmetic that knows nothing of models.

It gives draws that are pure functions of (seed, step, name, role), and kernels that make no temporary of a matrix's
size. May import nothing of tezo but `errors`.
"""

from tezo.numerics.factored_adam import AdamFactors as AdamFactors
from tezo.numerics.factored_adam import factored_adam_ as factored_adam_
from tezo.numerics.products import float32_on_emulating_cpu as float32_on_emulating_cpu
