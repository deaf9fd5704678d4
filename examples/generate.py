"""Ask a running cluster (`make run`) for text, for JSON of a schema, and for a few tokens of a long answer.

python examples/generate.py [ADDRESS]
"""

import json
import sys

import grpc
from tandem_client import Client, field_violations

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "lines": {"type": "integer", "minimum": 1, "maximum": 999},
    },
    "required": ["name", "lines"],
    "additionalProperties": False,
}

with Client(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051") as client:
    for part in client.stream("import ", max_tokens=24, temperature=0.0):
        print(part.text, end="", flush=True)
    print()

    answer = client.generate([{"role": "user", "content": "a module"}], max_tokens=64, seed=1, json_schema=SCHEMA)
    print(json.loads(answer.text), "by", answer.path.decode_worker)

    with client.stream("def ", max_tokens=500, timeout_s=60) as parts:
        print("first tokens:", list(next(parts).token_ids))  # leaving the stream cancels the rest

    try:
        client.generate("x", temperature=9.0)
    except grpc.RpcError as error:
        print(field_violations(error))
