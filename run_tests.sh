#!/usr/bin/env bash
# Lint, types and tests. --all adds long soaks, full counts of trials and all combinations of which
# the others have the parts; other arguments go to pytest.
set -euo pipefail
EXTRA="test"
source "$(dirname "${BASH_SOURCE[0]}")/tools/find_python.sh"
cd "$ROOT"

marks=(-m "not slow")
if [[ ${1:-} == --all ]]; then
  marks=(--full)
  shift
fi
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
"$PYTHON" -m mypy
OMP_NUM_THREADS=1 exec "$PYTHON" -m pytest ${marks[@]+"${marks[@]}"} "$@"
