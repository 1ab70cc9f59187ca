#!/bin/bash
# Real clients: the `openai` package and a Python gRPC client made from our .proto files, in a virtual environment. Skips where they cannot be installed.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
venv=${HEARTH_CLIENT_VENV:-$HEARTH_SOURCE_DIR/build/client-venv}
packages=(openai==1.109.1 grpcio==1.66.2 grpcio-tools==1.66.2 grpcio-reflection==1.66.2 grpcio-health-checking==1.66.2)
if ! "$venv/bin/python" -c 'import openai, grpc, grpc_tools, grpc_reflection, grpc_health' 2>/dev/null; then
  python3 -m venv "$venv" && "$venv/bin/pip" install --quiet --disable-pip-version-check "${packages[@]}" || { echo "SKIPPED: the clients could not be installed: ${packages[*]}"; exit 77; }
fi
generated=$(mktemp -d)
trap 'rm -rf "$generated"' EXIT
"$venv/bin/python" -m grpc_tools.protoc -I "$HEARTH_SOURCE_DIR/proto" --python_out="$generated" --grpc_python_out="$generated" \
  "$HEARTH_SOURCE_DIR"/proto/hearth/v1/inference.proto || exit 1
PYTHONPATH="$generated:$here" exec "$venv/bin/python" "$here/clients_test.py" "$@"
