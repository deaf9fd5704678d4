#!/bin/sh
# llm: a model of a server of one's own; a prompt, a form, and a conversation that goes on.
set -eu
export LLM_USER_PATH="$PWD" OPENAI_API_KEY=none
cat > extra-openai-models.yaml <<YAML
- model_id: mine
  model_name: $2
  api_base: $1/v1
  supports_schema: true
YAML
llm -m mine -o max_tokens 16 --no-stream 'import os' > whole
llm -m mine -o max_tokens 16 -o temperature 0 'import os' > streamed
llm -m mine -c 'and sys' -o max_tokens 16 > more
test -s whole && test -s streamed && test -s more
llm -m mine --schema '{"type": "object", "properties": {"city": {"const": "Lund"}}, "required": ["city"], "additionalProperties": false}' Where | grep '"Lund"'
