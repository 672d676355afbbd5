"""Where records come from: Kafka, or pushes over gRPC."""

import os

# Read once, when gRPC is imported: its C core writes to stderr, beside our logs [O4], for every failed
# handshake. What concerns a caller comes as a status or an exception anyway.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
