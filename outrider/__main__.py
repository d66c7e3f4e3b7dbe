"""python -m outrider: the command line."""

from outrider.cli.app import main

if __name__ == "__main__":
    main()
