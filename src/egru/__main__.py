"""Run the ``egru`` command with ``python -m egru``."""

import sys

from egru.cli import main

sys.exit(main())
