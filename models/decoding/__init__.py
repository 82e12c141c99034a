"""Phone recognition: an HMM over phone states, its best path, and the errors of a phone sequence.

Plain NumPy. `hmm` estimates the model on labelled frames, `viterbi` decodes, `errors` counts.
"""

from models.decoding.errors import PhoneErrors, count_errors
from models.decoding.hmm import UNSEEN, Counts, Hmm, PhoneStates, estimate, log_prior
from models.decoding.viterbi import Decoded, decode

__all__ = [
    "UNSEEN",
    "Counts",
    "Decoded",
    "Hmm",
    "PhoneErrors",
    "PhoneStates",
    "count_errors",
    "decode",
    "estimate",
    "log_prior",
]
