#!/usr/bin/env bash
# Train CONFIG (default debug_model) on this node; arguments override its keys. See --help.
#
#   ./run_train.sh [CONFIG] [--section.key value ...]
set -euo pipefail
exec "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/shardloom" train "$@"
