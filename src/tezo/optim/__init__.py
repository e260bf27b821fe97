"""The optimizers: an estimator, a perturbation and an update rule put together, and the named methods.

It gives `ZerothOrderOptimizer`, `FirstOrderOptimizer`, `METHODS`, and what a method needs in memory and for a learning
rate. May import estimators and what that may import.
"""
