"""`python -m remote_rm NAME --port 5000`: a verifier over HTTP, without lmm_r1."""

import sys

from remote_rm.registry import VERIFIERS, run

if __name__ == "__main__":
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in VERIFIERS:
        sys.exit(f"python -m remote_rm NAME [flags]: NAME must be one of {', '.join(VERIFIERS)}")
    run(name, sys.argv[2:], prog=f"python -m remote_rm {name}")
