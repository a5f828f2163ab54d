#!/usr/bin/env bash
# Train the run of CONFIG_FILE on this node; every argument overrides one key. See --help.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/tools/find_python.sh"

if [[ ${1:-} == --help || ${1:-} == -h ]]; then
  exec "$PYTHON" -m config help
fi
# Ranks get their own signals. torchrun would die of these and leave its ranks behind.
trap '' USR1 USR2
exec "$PYTHON" -m tools.launch "${CONFIG_FILE:-$ROOT/train_configs/debug_model.toml}" "$@"
