"""`python -m helpers.full_disk BYTES COMMAND ...`: `lmm-r1 COMMAND ...` where no file can grow beyond so many bytes.

A full disk does the same: a write ends early, or fails. It needs no mount, and holds for what libraries write, too.
"""

import resource
import sys

from lmm_r1.cli import main

if __name__ == "__main__":
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), hard))
    main(sys.argv[2:])
