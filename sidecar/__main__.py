"""`python -m sidecar` is `pd-sidecar`."""

import sys

from sidecar.cli import main

sys.exit(main())
