"""Random directions Z: their types, the parameters they perturb, and the factors they are built from.

The package has the types of directions (`spaces`), the parameters to be tuned (`targets`), the ranks
(`rank_selection`), the sources of fixed factors (`bases`) and the methods' rules for drawing directions
(`perturbations`). It may import numerics and what numerics may import.
"""
