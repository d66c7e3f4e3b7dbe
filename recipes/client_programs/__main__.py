"""`python -m recipes.client_programs NAME URL ...` tries a client, in the environment that has it."""

import importlib
import sys

importlib.import_module(f"recipes.client_programs.{sys.argv[1]}").main(*sys.argv[2:])
