"""`python -m frontend ...` is `tercet ...`."""

from __future__ import annotations

import sys

from frontend.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
