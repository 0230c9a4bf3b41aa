#!/usr/bin/env bash
# serve.sh on a CPU, without an accelerator, in an environment made by scripts/setup_sglang_cpu.py.
#
#   MODEL=/path/to/model ./serve_cpu.sh [any options of sglang serve]
set -euo pipefail

export SGLANG_USE_CPU_ENGINE=1
exec "$(dirname "$0")/serve.sh" --device cpu --attention-backend torch_native --sampling-backend pytorch --disable-overlap-schedule \
  --skip-server-warmup --page-size 16 --max-total-tokens 2048 --context-length 2048 --max-running-requests 4 --hicache-ratio 2 "$@"
