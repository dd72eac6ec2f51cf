"""The HTTP server: an OpenAI-compatible API over the serving engine."""
