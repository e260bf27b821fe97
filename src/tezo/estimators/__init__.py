"""From evaluations of a loss to an estimate of its gradient: along random directions, or from the last hidden states.

It gives the estimators and the records of what they measured. May import forward and what that may import.
"""
