"""Engines that the recipe `peers` compares. Each has a driver: a program that reads token ids and writes new ones."""
