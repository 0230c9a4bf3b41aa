#!/usr/bin/env bash
# A prefill server: computes prompts and lets decode servers pull their KV blocks.
#
#   MODEL=/path/to/model ./prefill.sh [any options of vllm serve]
#
# KV_HOST is the address that decode servers reach this machine at; KV_PORT the first worker's port (0: any).
# KBTP_SECRET_FILE names a file with a secret that both servers share; leave it out only on a network you trust.
set -euo pipefail

: "${MODEL:?set MODEL to what you would give to vllm serve}"
: "${HOST:=127.0.0.1}" "${PORT:=8100}" "${KV_HOST:=$HOST}" "${KV_PORT:=0}" "${LEASE_S:=30}"

extra="\"host\": \"$KV_HOST\", \"port\": $KV_PORT, \"lease_s\": $LEASE_S"
if [[ -n "${KBTP_SECRET_FILE:-}" ]]; then extra+=", \"secret_file\": \"$KBTP_SECRET_FILE\""; fi

exec vllm serve "$MODEL" --host "$HOST" --port "$PORT" --kv-transfer-config \
  "{\"kv_connector\": \"KBTPConnector\", \"kv_role\": \"kv_producer\", \"kv_connector_extra_config\": {$extra}}" "$@"
