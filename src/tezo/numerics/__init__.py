"""Random draws, stochastic rounding, scratch buffers, digests and matrix products; independent of models.

Draws are pure functions of (seed, step, name, role). Kernels allocate no temporary of the size of a matrix. This
package may import nothing of tezo but `errors`.
"""
