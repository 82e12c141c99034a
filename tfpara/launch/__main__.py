"""python -m tfpara.launch, which is `tfpara-launch`."""

import sys

from tfpara.launch.command import main

sys.exit(main())
