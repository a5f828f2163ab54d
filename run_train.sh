#!/usr/bin/env bash
# Train the run of CONFIG_FILE on this node; every argument overrides one key. See --help.
set -euo pipefail
# Called through links, it is in the folder of what they lead to.
script=${BASH_SOURCE[0]}
while [[ -L $script ]]; do
  link=$(readlink "$script")
  [[ $link == /* ]] || link=$(dirname "$script")/$link
  script=$link
done
source "$(dirname "$script")/tools/find_python.sh"
find_python

if [[ ${1:-} == --help || ${1:-} == -h ]]; then
  exec "$PYTHON" -P -m config help
fi
# -P: what lies in the folder this is called from is not ours to import.
exec "$PYTHON" -P -m tools.launch "${CONFIG_FILE:-$ROOT/train_configs/debug_model.toml}" "$@"
