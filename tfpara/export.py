"""The former place of `tfpara.export`; goes with the former form of the call.

An import of this module binds it to the name of the function. So that `tfpara.export(...)` works
then too, the function takes the module's place.
"""

import sys

from tfpara.saved_model import export

sys.modules[__name__] = export  # type: ignore[assignment]
