"""The benchmark: what a step costs in time and memory, against plain forward passes and the published algorithms.

Labels in tables and files: F2 is two forward passes of the stock model, N2 the same with only the needed
logits; a method's name is ours; "published:" before it is the algorithm as its authors wrote it.
"""
