"""`python -m dsv4dist`: the same as the `dsv4dist` command."""

from dsv4dist.cli.app import main

if __name__ == "__main__":
    main()
