#!/bin/sh
# Makes ./tandem of the proto, with protoc, protoc-gen-go and protoc-gen-go-grpc.
set -e
cd "$(dirname "$0")"
mkdir -p tandem
${PROTOC:-protoc} -I "${PROTOS:-../../../protos}" --go_out=tandem --go-grpc_out=tandem \
  --go_opt=paths=source_relative,Mtandem/v1/llm.proto=tandem.example/tandem \
  --go-grpc_opt=paths=source_relative,Mtandem/v1/llm.proto=tandem.example/tandem tandem/v1/llm.proto
mv tandem/tandem/v1/*.go tandem/ && rm -r tandem/tandem
