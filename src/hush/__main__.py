"""`python -m hush` is the command line."""

from hush.cli.main import main

main()
