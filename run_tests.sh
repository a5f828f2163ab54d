#!/usr/bin/env bash
# Lint, types and tests. --all adds long soaks, full counts of trials and all combinations of which
# the others have the parts; other arguments go to pytest.
#
#   ./run_tests.sh [--all] [pytest arguments]
#   ./run_tests.sh --torch VERSION [--lowest|--newest] [pytest arguments]
#
# The latter runs the tests alone, with that PyTorch, in an environment of its own that is kept: with
# the other packages of constraints.txt, or the lowest versions that pyproject.toml allows, or the
# newest there were when it was made.
set -euo pipefail
# Called through links, it is in the folder of what they lead to.
script=${BASH_SOURCE[0]}
while [[ -L $script ]]; do
  link=$(readlink "$script")
  [[ $link == /* ]] || link=$(dirname "$script")/$link
  script=$link
done
source "$(dirname "$script")/tools/find_python.sh"
cd "$ROOT"

marks=(-m "not slow")
if [[ ${1:-} == --torch ]]; then
  torch=("${2:-}")
  shift $(($# > 1 ? 2 : 1))
  if [[ ${1:-} == --lowest || ${1:-} == --newest ]]; then
    torch+=("$1")
    shift
  fi
  find_torch_python "${torch[@]}"
else
  find_python test
  if [[ ${1:-} == --all ]]; then
    marks=(--full)
    shift
  fi
  "$PYTHON" -m ruff check .
  "$PYTHON" -m ruff format --check .
  "$PYTHON" -m mypy
fi
# Tests start run_train.sh, which asks PYTHON first.
export PYTHON
OMP_NUM_THREADS=1 exec "$PYTHON" -m pytest ${marks[@]+"${marks[@]}"} "$@"
