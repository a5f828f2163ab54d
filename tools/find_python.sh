# Source this file. find_python [EXTRA] sets PYTHON to an interpreter with all requirements of
# pyproject.toml and of the named extra. find_torch_python VERSION [--lowest|--newest] sets it to one
# with that PyTorch, for tests.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# Candidates in order: PYTHON, an active environment, .venv, python3. The first one with PyTorch is
# used; if it lacks other packages, an environment on top of it gets them. PYTHON gets an environment
# even without PyTorch. If no candidate has PyTorch, create .venv.
find_python() {
  local extra=${1:-} candidate lacks
  for candidate in "${PYTHON:-}" "${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/python}" \
                   "${CONDA_PREFIX:+$CONDA_PREFIX/bin/python}" "$ROOT/.venv/bin/python" python3; do
    [[ -n $candidate ]] || continue
    lacks=$("$candidate" "$ROOT/tools/missing_requirements.py" ${extra:+"$extra"} 2>/dev/null) ||
      lacks="torch>="
    if [[ -z $lacks ]]; then
      PYTHON=$candidate
      return
    fi
    if [[ $lacks != *torch\>=* || $candidate == "${PYTHON:-}" ]]; then
      make_environment "$candidate" ${extra:+"$extra"}
      return
    fi
  done
  make_environment "$(new_enough python3 python3.13 python3.12 python3.11)" ${extra:+"$extra"}
}

find_torch_python() {
  make_environment "${PYTHON:-$(new_enough python3.11 python3 python3.12 python3.13)}" --torch "$@"
}

make_environment() {
  local interpreter=$1
  shift
  if ! new_enough "$interpreter" >/dev/null; then
    echo "Shardloom needs Python 3.11 or newer${interpreter:+, not $interpreter}; set PYTHON to one" >&2
    exit 1
  fi
  PYTHON=$("$interpreter" "$ROOT/tools/make_environment.py" "$@") || exit
}

# Print the first interpreter that runs and is new enough.
new_enough() {
  local interpreter
  for interpreter in "$@"; do
    if "$interpreter" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$interpreter"
      return
    fi
  done
  return 1
}

export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
