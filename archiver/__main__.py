"""`python -m archiver` is the same program as `dfe-archiver`."""

from archiver.cli import main

if __name__ == "__main__":
    main()
