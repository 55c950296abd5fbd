"""`python -m sparsify` is the command `sparsify`."""

from sparsify.cli.main import run

if __name__ == "__main__":
    run()
