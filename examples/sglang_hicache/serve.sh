#!/usr/bin/env bash
# An SGLang server whose hierarchical cache ends in KBTP stores.
#
#   MODEL=/path/to/model ./serve.sh [any options of sglang serve]
#
# STORES are the stores, host:port with commas between. KBTP_SECRET_FILE names a file with the secret that the stores ask for.
set -euo pipefail

: "${MODEL:?set MODEL to what you would give to sglang serve}"
: "${HOST:=127.0.0.1}" "${PORT:=30000}" "${STORES:=127.0.0.1:7400}"

extra="\"backend_name\": \"kbtp\", \"stores\": \"$STORES\""
if [[ -n "${KBTP_SECRET_FILE:-}" ]]; then extra+=", \"secret_file\": \"$KBTP_SECRET_FILE\""; fi

exec python -m sglang.launch_server --model-path "$MODEL" --host "$HOST" --port "$PORT" --enable-hierarchical-cache \
  --hicache-storage-backend dynamic --hicache-storage-backend-extra-config "{$extra}" --enable-cache-report "$@"
