import sys
from pathlib import Path

# For the module that the tests share with the workers' program.
sys.path.insert(0, str(Path(__file__).parent))
