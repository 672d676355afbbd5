"""The push listener's protocol as generated code; `docs/grpc.md` says how to generate it anew."""
