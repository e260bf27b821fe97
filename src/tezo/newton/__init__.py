"""The default method: directions found by regressions on training rows, and steps of Gauss-Newton along them."""
