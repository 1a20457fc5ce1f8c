"""Who listens: HTTP, gRPC, and the token and certificates that both go by."""
