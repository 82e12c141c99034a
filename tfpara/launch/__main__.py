"""`python -m tfpara.launch`, which does the same as `tfpara-launch`."""

import sys

from tfpara.launch.command import main

sys.exit(main())
