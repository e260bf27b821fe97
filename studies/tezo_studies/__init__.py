"""What is measured with tezo: analyses, benchmarks of time and memory, the paper's tables of accuracies and costs.

It gives the commands `tezo analyze`, `tezo bench` and `tezo reproduce`, by the entry-point group `tezo.commands`.
"""
