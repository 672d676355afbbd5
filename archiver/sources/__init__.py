"""Where records come from: Kafka, or pushes over gRPC."""
