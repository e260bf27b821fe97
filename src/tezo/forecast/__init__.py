"""Forecasts of runs: memory, time and passes, before the first step."""
