"""`python -m trunkattn` is the command `trunkattn`."""

from trunkattn.cli import main

if __name__ == "__main__":
    main()
