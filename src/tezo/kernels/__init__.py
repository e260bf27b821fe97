"""Operations worth code of their own: tiled products, and writes that pass over a weight once."""

from tezo.kernels.factored_adam import AdamFactors as AdamFactors
from tezo.kernels.factored_adam import factored_adam_ as factored_adam_
from tezo.kernels.products import wide_products as wide_products
