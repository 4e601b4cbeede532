"""`python -m legato.cli`: the same as `legato`."""

from legato.cli import main

main()
