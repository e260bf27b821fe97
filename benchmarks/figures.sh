#!/bin/sh
# The figures of docs/figures.md: `DATA=folder benchmarks/figures.sh [NAME...]`, with the rows of SST-2 in DATA/sst2.
# Some fifteen minutes on two cores.
cd "$(dirname "$0")/.." || exit 1
TEZO="${TEZO:-.venv/bin/tezo}"
OUT=docs/figures
ROWS="--model embedded:all-minilm-l6-v2 --task sst2 --data-dir $DATA --set data.num_train=800 --set data.num_dev=100 --set data.num_test=100"

figure() {
    case $1 in
        gradient-spectrum | gradient-subspace) "$TEZO" analyze "$1" $ROWS --set steps=50 --output $OUT ;;
        weight-rank) "$TEZO" analyze "$1" $ROWS --output $OUT ;;
        memory) "$TEZO" analyze "$1" benchmarks/results/memory_cpu.json --output $OUT ;;
        step-time) "$TEZO" analyze "$1" benchmarks/results/step_cpu.json --output $OUT ;;
        loss) losses ;;
        *) "$TEZO" analyze "$1" --output $OUT ;;
    esac
}

losses() {
    runs=$(mktemp -d)
    for method in tezo:1e-4 tezo-cadam:3e-4 mezo:1e-4; do
        "$TEZO" train $ROWS --method "${method%:*}" --set "method.lr=${method#*:}" --steps 50 \
            --set train.eval_every=0 --output "$runs/${method%:*}" --json > /dev/null || exit 1
    done
    "$TEZO" analyze loss "$runs"/* --output $OUT
    rm -r "$runs"
}

for name in "${@:-all}"; do
    if [ "$name" = all ]; then
        set -- gradient-spectrum gradient-subspace weight-rank second-moment estimator convergence half-precision \
            memory step-time loss
        for each; do figure "$each"; done
    else
        figure "$name"
    fi
done
