"""HTTP: OpenAI and native protocols, streaming, limits, authentication, metrics."""
