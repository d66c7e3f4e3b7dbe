"""vLLM's own server, started from an environment that the user names; vLLM is never imported."""
