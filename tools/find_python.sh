# Source this file. find_python [EXTRA] sets PYTHON to an interpreter with all requirements of
# pyproject.toml and of the named extra. find_torch_python --torch VERSION [--lowest|--newest] sets it
# to one with that PyTorch, for tests; find_torch_python --cuda to one with a CUDA build.

ROOT=$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# Candidates in order: PYTHON, an active environment, .venv, python3. The first one with PyTorch is
# used; if it lacks other packages, an environment on top of it gets them. PYTHON gets an environment
# even without PyTorch. If no candidate has PyTorch, create .venv.
find_python() {
  local extra=${1:-} wanted=${PYTHON:-} candidate lacks
  for candidate in "$wanted" "${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/python}" \
                   "${CONDA_PREFIX:+$CONDA_PREFIX/bin/python}" "$ROOT/.venv/bin/python" python3; do
    [[ -n $candidate ]] || continue
    lacks=$("$candidate" "$ROOT/tools/missing_requirements.py" ${extra:+"$extra"} 2>/dev/null) ||
      lacks="torch>="
    if [[ -z $lacks ]]; then
      PYTHON=$candidate
      return
    fi
    if [[ $lacks != *torch\>=* || $candidate == "$wanted" ]]; then
      make_environment "$candidate" ${extra:+"$extra"}
      if [[ -n $wanted && $PYTHON != "$wanted" ]]; then
        echo "environment: $PYTHON, because PYTHON=$wanted lacks ${lacks//$'\n'/, }" >&2
      fi
      return
    fi
    if [[ $candidate != "$ROOT/.venv/bin/python" && $candidate != python3 ]]; then
      echo "environment: the active $candidate is not used: $(problem_of "$candidate" ||
        echo "it lacks ${lacks%%$'\n'*}")" >&2
    fi
  done
  make_environment "$(new_enough python3 python3.14 python3.13 python3.12 python3.11)" ${extra:+"$extra"}
}

find_torch_python() {
  make_environment "${PYTHON:-$(new_enough python3.11 python3 python3.12 python3.13 python3.14)}" "$@"
}

make_environment() {
  local interpreter=$1 problem
  shift
  if problem=$(problem_of "${interpreter:-python3}"); then
    echo "${PYTHON:+PYTHON=}${interpreter:-python3}: $problem; set PYTHON to Python 3.11 or newer" >&2
    exit 2
  fi
  PYTHON=$("$interpreter" "$ROOT/tools/make_environment.py" "$@") || exit
}

# Print why an interpreter cannot be used; return 1 if it can.
problem_of() {
  local output code=0
  # An argument of sys.exit is printed, unless it is False.
  output=$("$1" -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and "it is %d.%d" % v[:2])' \
    2>&1) || code=$?
  ((code)) || [[ -n $output ]] || return 1
  output=${output##*$'\n'}
  # Without the place in this file that bash puts in front.
  output=${output#*: line [0-9]*: }
  echo "${output:-it exits with $code}"
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

# Python must import nothing from the caller's current folder (docs/security.md): neither as the
# folder of a command, nor by an empty entry of PYTHONPATH, which stands for it.
export PYTHONSAFEPATH=1
entries=":${PYTHONPATH:-}:"
while [[ $entries == *::* ]]; do
  entries=${entries//::/:}
done
entries=${entries#:} entries=${entries%:}
export PYTHONPATH="$ROOT${entries:+:$entries}"
