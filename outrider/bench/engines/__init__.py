"""Other engines. Each has a file: its driver, its environment, what converts models."""
