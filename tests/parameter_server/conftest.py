"""Lets the tests import modules beside them, such as the cluster of processes."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
