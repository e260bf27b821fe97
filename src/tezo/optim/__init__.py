"""Optimizers, which combine an estimator, a perturbation and an update rule, and the named methods.

The package has `ZerothOrderOptimizer`, `FirstOrderOptimizer`, `METHODS`, the memory forecast and the measurement of a
learning rate. It may import estimators and what estimators may import.
"""
