#!/bin/sh
# Ask a running cluster (`make run`) by curl: a chat's answer as it is written, JSON of a schema, a message.
#
# sh examples/chat.sh [URL]
set -eu
url=${1:-http://127.0.0.1:8000}
ask() { curl --fail-with-body --silent --show-error --no-buffer "$url$1" -H "content-type: application/json" -d "$2"; }

model=$(curl --fail-with-body --silent --show-error "$url/v1/models" | sed 's/.*"data":\[{"id":"\([^"]*\)".*/\1/')
question='[{"role": "user", "content": "import os"}]'
schema='{"type": "object", "properties": {"lines": {"type": "integer", "maximum": 999, "minimum": 1}}, "required": ["lines"]}'

ask /v1/chat/completions "{\"model\": \"$model\", \"messages\": $question, \"max_tokens\": 24, \"stream\": true}"
ask /v1/chat/completions "{\"model\": \"$model\", \"messages\": $question, \"max_tokens\": 64,
  \"response_format\": {\"type\": \"json_schema\", \"json_schema\": {\"name\": \"module\", \"schema\": $schema}}}"
echo
ask /v1/messages "{\"model\": \"$model\", \"messages\": $question, \"max_tokens\": 24}"
echo
