"""A daemon that archives Kafka topics (or gRPC pushes) into compressed files that standard tools read."""

__version__ = "0.1.0"
