"""`python -m hypjax`, the program `hypjax` where its script is not on the path."""

from hypjax.cli import main

if __name__ == "__main__":
    main()
