"""`python -m biphase` is `biphase`."""

from biphase.cli import main

main()
