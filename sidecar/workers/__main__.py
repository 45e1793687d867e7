"""How the hub starts a worker."""

import sys

from sidecar.workers.worker import main

sys.exit(main())
