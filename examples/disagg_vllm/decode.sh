#!/usr/bin/env bash
# A decode server: pulls the KV blocks of a prompt from the prefill server that computed it, and goes on from there.
#
#   MODEL=/path/to/model ./decode.sh [any options of vllm serve]
#
# Give it the same model and the options that change the KV cache (--dtype, --kv-cache-dtype, --block-size, ...) as prefill.
# LOAD_TIMEOUT_S is how long a load may take before the prompt is computed here instead.
set -euo pipefail

: "${MODEL:?set MODEL to what you would give to vllm serve}"
: "${HOST:=127.0.0.1}" "${PORT:=8200}" "${LOAD_TIMEOUT_S:=10}"

extra="\"load_timeout_s\": $LOAD_TIMEOUT_S"
if [[ -n "${KBTP_SECRET_FILE:-}" ]]; then extra+=", \"secret_file\": \"$KBTP_SECRET_FILE\""; fi

exec vllm serve "$MODEL" --host "$HOST" --port "$PORT" --kv-transfer-config \
  "{\"kv_connector\": \"KBTPConnector\", \"kv_role\": \"kv_consumer\", \"kv_load_failure_policy\": \"recompute\",
    \"kv_connector_extra_config\": {$extra}}" "$@"
