"""`python -m tfpara.chaos`, which does the same as `tfpara-chaos`."""

import sys

from tfpara.chaos.command import main

sys.exit(main())
