"""The run itself: the loop of steps and evaluations, what it writes, and when it turns back or ends.

It gives `train` and `replay`. May import preparation and configuration.
"""
