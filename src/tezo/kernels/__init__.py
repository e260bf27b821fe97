"""Writes that are worth code of their own: one pass over a weight, in torch on a CPU and in Triton on a GPU."""

from tezo.kernels.factored_adam import AdamFactors as AdamFactors
from tezo.kernels.factored_adam import factored_adam_ as factored_adam_
