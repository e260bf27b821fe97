"""Gradient estimators, which use random directions or the error at the last hidden states, and their records.

The package may import forward and what forward may import.
"""
