"""`python -m fullgraph`: the command line."""

from fullgraph.cli import main

if __name__ == "__main__":
    main()
