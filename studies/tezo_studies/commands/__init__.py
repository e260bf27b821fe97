"""The commands `tezo analyze`, `bench` and `reproduce`. They import torch when they run, not before."""
