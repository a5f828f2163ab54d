#!/usr/bin/env bash
# Run lint, type checks and tests. --all adds slow tests, full trial counts and larger combinations
# of options; other arguments go to pytest.
#
#   ./run_tests.sh [--all] [pytest arguments]
#   ./run_tests.sh --torch VERSION [--lowest|--newest] [pytest arguments]
#   ./run_tests.sh --gpu-stub [pytest arguments]
#
# One file of tests more than there are CPU cores runs at a time, because many tests wait: 3 to 8
# (pytest-xdist); -n 0 runs one, as --pdb needs.
#
# --torch runs only the tests, with that PyTorch in a persistent environment. Other packages have the
# versions of constraints.txt, with --lowest the lowest that pyproject.toml allows, with --newest the
# newest at the time of installation.
#
# --gpu-stub runs only tests/gpu_without_gpu, in a persistent environment with a CUDA build of PyTorch.
set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/tools/find_python.sh"
cd "$ROOT"

marks=(-m "not slow")
types=""
if [[ ${1:-} == --torch ]]; then
  torch=("${2:-}")
  shift $(($# > 1 ? 2 : 1))
  if [[ ${1:-} == --lowest || ${1:-} == --newest ]]; then
    torch+=("$1")
    shift
  fi
  find_torch_python --torch "${torch[@]}"
elif [[ ${1:-} == --gpu-stub ]]; then
  shift
  find_torch_python --cuda
  marks=(--gpu-stub -rs tests/gpu_without_gpu)
else
  find_python test
  if [[ ${1:-} == --all ]]; then
    marks=(--full)
    shift
  fi
  "$PYTHON" -m ruff check .
  "$PYTHON" -m ruff format --check .
  # Beside the tests, because it takes half a minute; reported after them.
  type_errors=$(mktemp)
  "$PYTHON" -m mypy > "$type_errors" 2>&1 &
  types=$!
fi
# Tests start run_train.sh, which tries PYTHON first.
export PYTHON
# Each program that they start would compile the sources again.
unset PYTHONDONTWRITEBYTECODE
workers=$("$PYTHON" -c 'import os; print(max(3, min(8, 1 + len(os.sched_getaffinity(0)))))')
code=0
OMP_NUM_THREADS=1 "$PYTHON" -m pytest "${marks[@]}" -n "$workers" --dist loadfile --no-loadscope-reorder "$@" || code=$?
if [[ -n $types ]]; then
  wait "$types" || code=1
  cat "$type_errors"
  rm "$type_errors"
fi
exit "$code"
