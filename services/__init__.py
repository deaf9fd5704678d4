"""The processes of a cluster. Their stderr has only log events, so gRPC's own messages are turned off."""

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC reads it at import
