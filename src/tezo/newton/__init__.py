"""Methods that see inside a model: gauss-newton for labels and texts, the probe, and policy-gradient."""
