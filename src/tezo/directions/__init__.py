"""Random directions Z: their types, the rules that draw them, their fixed factors and the parameters they perturb."""
