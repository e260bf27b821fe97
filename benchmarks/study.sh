#!/bin/sh
# The study of docs/experiments.md: `DATA=FOLDER [STUDY=study-long] [RUNS=FOLDER] [DEVICES=cpu,cpu]
# [ONLY=mezo,tezo,lozo-adam-act] benchmarks/study.sh [COLUMN...]`, with the rows of each task in DATA/TASK; columns as
# sst2-16, both of 16 rows a class by default, one after the other; ONLY cuts the lines. It goes on where it stopped.
# 211 runs a column, 55 of study-long: hours on two cores.
cd "$(dirname "$0")/.." || exit 1
TEZO="${TEZO:-.venv/bin/tezo}"
PYTHON="${PYTHON:-.venv/bin/python}"
STUDY="${STUDY:-study}"
RUNS="${RUNS:-runs/$STUDY}"

[ $# -gt 0 ] || set -- sst2-16 trec-16
for column; do
    "$TEZO" reproduce "$STUDY" --only "$column${ONLY:+,$ONLY}" --data-dir "$DATA" --devices "${DEVICES:-cpu,cpu}" \
        --output "$RUNS" || exit 1
    "$PYTHON" benchmarks/study.py "$RUNS" || exit 1
done
