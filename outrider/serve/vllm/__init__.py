"""vLLM behind Outrider's commands: a process of its own, from an environment that the user names; never imported."""
