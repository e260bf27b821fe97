#!/bin/sh
# The study of docs/experiments.md: `DATA=FOLDER [RUNS=FOLDER] [DEVICES=cpu,cpu] [ONLY=mezo,tezo,lozo-adam-act]
# benchmarks/study.sh [COLUMN...]`, with the rows of each task in DATA/TASK; columns as sst2-16, all of them by default,
# one after the other; ONLY cuts the lines. It goes on where it stopped. 184 runs a column: hours on two cores.
cd "$(dirname "$0")/.." || exit 1
TEZO="${TEZO:-.venv/bin/tezo}"
PYTHON="${PYTHON:-.venv/bin/python}"
RUNS="${RUNS:-runs/study}"

[ $# -gt 0 ] || set -- sst2-16 trec-16 sst2-512 trec-512 sst5-16 snli-16 rte-16
for column; do
    "$TEZO" reproduce study --only "$column${ONLY:+,$ONLY}" --data-dir "$DATA" --devices "${DEVICES:-cpu,cpu}" \
        --output "$RUNS" || exit 1
    "$PYTHON" benchmarks/study.py "$RUNS" || exit 1
done
