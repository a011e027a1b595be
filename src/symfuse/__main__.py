"""`python -m symfuse`: the command line without its script on the path."""

from symfuse.cli import main

main()
