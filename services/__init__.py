"""The processes of a cluster. Their stderr has events alone: gRPC's core would write lines of its own between them."""

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # read when grpc is imported
