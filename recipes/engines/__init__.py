"""Engines that the recipe `peers` compares. Each has a file: its driver, its environment, what converts models."""
