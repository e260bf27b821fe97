#!/bin/sh
# The CPU table of the README: benchmarks/results/step_cpu.json and memory_cpu.json. Leave the machine alone meanwhile.
cd "$(dirname "$0")/.." && exec "${PYTHON:-.venv/bin/python}" benchmarks/cpu.py "$@"
