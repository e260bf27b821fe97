"""What is measured with the library: analyses, benchmarks, tables of accuracies, reports.

It gives what `tezo analyze`, `bench`, `reproduce` and `report` run. May import training and what that may import.
"""
