"""``python -m egru`` is ``egru``."""

import sys

from egru.cli import main

sys.exit(main())
