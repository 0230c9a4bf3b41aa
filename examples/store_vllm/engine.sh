#!/usr/bin/env bash
# A vLLM engine that keeps its prompts' KV blocks in a store, and loads from there what any engine of the same geometry has saved.
#
#   MODEL=/path/to/model ./engine.sh [any options of vllm serve]
#
# STORE is one `kbtp serve` or several, with commas between. TENANT is whose values they are there.
# KBTP_SECRET_FILE names a file with the secret of TRUST_DOMAIN, if the store asks for one.
set -euo pipefail

: "${MODEL:?set MODEL to what you would give to vllm serve}"
: "${HOST:=127.0.0.1}" "${PORT:=8000}" "${STORE:=127.0.0.1:7400}" "${TENANT:=vllm}" "${TRUST_DOMAIN:=}"

extra="\"mode\": \"store\", \"store\": \"$STORE\", \"tenant\": \"$TENANT\""
if [[ -n "${KBTP_SECRET_FILE:-}" ]]; then extra+=", \"secret_file\": \"$KBTP_SECRET_FILE\", \"trust_domain\": \"$TRUST_DOMAIN\""; fi

exec vllm serve "$MODEL" --host "$HOST" --port "$PORT" --kv-transfer-config \
  "{\"kv_connector\": \"KBTPConnector\", \"kv_role\": \"kv_both\", \"kv_load_failure_policy\": \"recompute\",
    \"kv_connector_extra_config\": {$extra}}" "$@"
