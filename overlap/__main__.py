"""`python -m overlap`: see `overlap.cli`."""

import sys

from overlap.cli import main

sys.exit(main())
