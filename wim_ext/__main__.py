"""`python -m wim_ext` is the `wim` command."""

from wim_ext.cli import main

if __name__ == "__main__":
    main()
