"""Optimizers, which combine a perturbation, an estimator and an update rule, and the named methods."""
