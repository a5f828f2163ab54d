#!/usr/bin/env bash
# Train the run of CONFIG_FILE on this node; every argument overrides one key. See --help.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/tools/find_python.sh"

if [[ ${1:-} == --help || ${1:-} == -h ]]; then
  exec "$PYTHON" -P -m config help
fi
# -P: what lies in the folder this is called from is not ours to import.
exec "$PYTHON" -P -m tools.launch "${CONFIG_FILE:-$ROOT/train_configs/debug_model.toml}" "$@"
