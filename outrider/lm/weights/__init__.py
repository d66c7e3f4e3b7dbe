"""Weights that stay packed: blocks of small codes with scales, as GGUF files have them, and products with them."""
