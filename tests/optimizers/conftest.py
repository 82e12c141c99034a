"""Lets the tests import modules beside them, such as the reference in NumPy."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
