"""From the losses of perturbed models to an estimate of the gradient, one file for each estimator."""
