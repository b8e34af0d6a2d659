#!/usr/bin/env bash
# Run benchmarks on one core and keep what they print, with the command and the versions, in results/benchmarks: as text
# and as JSON, which `benchmarks/compare.py` reads.
#
#     PROXVI_DATA=... bash benchmarks/record.sh cost svi_cost fit_cost
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p results/benchmarks
declare -A arguments=(
    [cost]="--rounds 60 --steps 60"
    [svi_cost]="--rounds 15 --steps 20"
    [fit_cost]="--steps 16000 --every 500 --checkpoint-every 60"
    [gradient_variance]=""
    [memory]=""
    [starts]=""
    [sbn_speed]=""
    [vae_speed]=""
    [evaluation_speed]=""
)
for name in "$@"; do
    command="python benchmarks/$name.py ${arguments[$name]}"
    printed=$(taskset -c "${CORE:-1}" $command --json "results/benchmarks/$name.json")
    {
        echo "\$ $command"
        echo "$printed"
        echo
        python -c "import importlib.metadata as m, platform
print('Python', platform.python_version(), *(f'{n} {m.version(n)}' for n in ('proxvi', 'jax', 'optax', 'numpyro')), sep=', ')"
        grep -m1 "model name" /proc/cpuinfo | cut -d: -f2- | xargs echo "one core of"
    } > "results/benchmarks/$name.txt"
    cat "results/benchmarks/$name.txt"
done
