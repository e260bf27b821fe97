"""Draws, rounding, scratch memory, digests and products: arithmetic that knows nothing of models.

It gives draws that are pure functions of (seed, step, name, role), and kernels that make no temporary of a matrix's
size. May import nothing of tezo but `errors`.
"""
