# Sourced by run_train.sh and run_tests.sh: sets PYTHON to an interpreter that has what the project
# needs, and installs into .venv only if none has. EXTRA: an extra of pyproject.toml, or nothing.
#
# Asked in turn: PYTHON, an active environment, .venv, python3.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
EXTRA=${EXTRA:-}

has_requirements() {
  local missing
  missing=$("$1" "$ROOT/tools/missing_requirements.py" ${EXTRA:+"$EXTRA"} 2>/dev/null) && [[ -z $missing ]]
}

is_new_enough() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

create_venv() {
  local base
  for base in "${PYTHON:-python3}" python3 python3.13 python3.12 python3.11 ""; do
    [[ -n $base ]] && is_new_enough "$base" && break
  done
  if [[ -z $base ]]; then
    echo "Shardloom needs Python 3.11 or newer; set PYTHON to one" >&2
    exit 1
  fi
  echo "Installing the requirements into $ROOT/.venv (once, some minutes)" >&2
  "$base" -m venv "$ROOT/.venv"
  "$ROOT/.venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    --constraint "$ROOT/constraints.txt" "$ROOT${EXTRA:+[$EXTRA]}" >&2
}

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" "${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/python}" \
                   "${CONDA_PREFIX:+$CONDA_PREFIX/bin/python}" "$ROOT/.venv/bin/python" python3; do
    if [[ -n $candidate ]] && has_requirements "$candidate"; then
      PYTHON=$candidate
      return
    fi
  done
  create_venv
  PYTHON=$ROOT/.venv/bin/python
}

find_python
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
