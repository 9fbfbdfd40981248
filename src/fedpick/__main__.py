"""`python -m fedpick`: the same as the program `fedpick`."""

from fedpick.cli import main

if __name__ == "__main__":
    main()
