"""What a direction Z is, which parameters have one, and the factors it is drawn from.

It gives the spaces of directions, the targets of a model, the rank of each, the bases and the perturbations. May import
numerics and what that may import.
"""
