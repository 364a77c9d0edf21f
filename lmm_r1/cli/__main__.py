"""`python -m lmm_r1.cli` is `lmm-r1`."""

from lmm_r1.cli import main

if __name__ == "__main__":
    main()
