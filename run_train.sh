#!/usr/bin/env bash
# Train CONFIG_FILE on this node; arguments override its keys. See --help.
set -euo pipefail
# Resolve symlinks to find the folder of this script.
script=${BASH_SOURCE[0]}
while [[ -L $script ]]; do
  link=$(readlink "$script")
  [[ $link == /* ]] || link=$(dirname "$script")/$link
  script=$link
done
source "$(dirname "$script")/tools/find_python.sh"
find_python

if [[ ${1:-} == --help || ${1:-} == -h ]]; then
  exec "$PYTHON" -m config help
fi
exec "$PYTHON" -m launcher.launch "${CONFIG_FILE:-$ROOT/train_configs/debug_model.toml}" "$@"
